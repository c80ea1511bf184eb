"""The command line: one file per group of commands; anything heavy is imported inside them."""

from headgate.cli.entry import COMMANDS, main, run

__all__ = ["COMMANDS", "main", "run"]
