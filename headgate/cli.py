"""The command line: thin subcommands; whatever is heavy is imported inside them."""

import inspect
import sys
from collections.abc import Callable, Sequence

from headgate.errors import HeadgateError, suggestion
from headgate.version import __version__


def mechanisms(name: str | None = None, /) -> None:
    """List the attention mechanisms, or show one with its formula, options and ablations.

    Args:
        name: The mechanism to show; all of them in a table when absent.
    """
    from headgate.catalogue import print_all, print_one

    if name is None:
        print_all()
    else:
        print_one(name)


COMMANDS: dict[str, Callable[..., None]] = {"mechanisms": mechanisms}


def overview() -> str:
    """What `headgate --help` prints: made from the commands' own docstrings, without importing a parser."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: headgate COMMAND [OPTIONS]",
        "",
        "Does this attention mechanism beat plain attention, by how much, at what cost?",
        "",
        "commands:",
        *(f"  {name:<{width}}  {inspect.getdoc(run).splitlines()[0]}" for name, run in COMMANDS.items()),  # type: ignore[union-attr]
        "",
        "headgate COMMAND --help tells a command's options; headgate --version the version.",
    ]
    return "\n".join(lines)


def run(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return
    if arguments[0] == "--version":
        print(f"headgate {__version__}")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise HeadgateError(f"unknown command {name!r}; {suggestion(name, COMMANDS)}")
    import tyro

    tyro.cli(COMMANDS[name], prog=f"headgate {name}", args=rest)


def main() -> None:
    try:
        run(sys.argv[1:])
    except HeadgateError as error:
        print(f"headgate: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left, as `| head` does; nothing is wrong here


if __name__ == "__main__":
    main()
