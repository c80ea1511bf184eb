"""The command line: a file for each group of commands; whatever is heavy is imported inside them."""

from headgate.cli.entry import COMMANDS, main, run

__all__ = ["COMMANDS", "main", "run"]
