"""`python -m benchmarks.language`: see compare.py."""

from benchmarks.language.compare import main

main()
