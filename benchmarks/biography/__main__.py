"""`python -m benchmarks.biography`: see compare.py."""

from benchmarks.biography.compare import main

main()
