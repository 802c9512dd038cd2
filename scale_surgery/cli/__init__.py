"""The command line: a module per command. The module `program` groups them."""

from scale_surgery.cli.program import main

__all__ = ["main"]
