"""`python -m benchmarks.streams`: see compare.py."""

from benchmarks.streams.compare import main

if __name__ == "__main__":
    main()
