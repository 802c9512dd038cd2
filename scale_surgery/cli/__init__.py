"""The command line: a module per command; program.py groups them."""

from scale_surgery.cli.program import main

__all__ = ["main"]
