"""The command line: one module for each command, or for each pair that belong together."""

from scale_surgery.cli.program import main

__all__ = ["main"]
