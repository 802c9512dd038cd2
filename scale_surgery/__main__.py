"""`python -m scale_surgery` is the command `scale-surgery`."""

from scale_surgery.cli.program import main

if __name__ == "__main__":
    main()
