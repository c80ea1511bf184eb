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


def prepare(
    source: str | None = None,
    out: str | None = None,
    /,
    *,
    tokenizer: str = "bpe:4096",
    text_column: str = "text",
    splits: str = "80/10/10",
    dedup: bool = False,
    max_tokens: int | None = None,
    end_of_text: str | None = None,
    workers: int | None = None,
    check: str | None = None,
) -> None:
    """Turn text into token shards, or verify the shards of a folder with --check.

    Args:
        source: 'stdlib', a file, a folder, a glob, or an address such as hf://datasets/HuggingFaceFW/fineweb.
        out: The folder to write; an interrupted prepare goes on when it is run again.
        tokenizer: 'byte', 'bpe:N', a tokenizer.json, a folder with one, or a name on the hub.
        text_column: The column or key that holds the text in parquet and JSON.
        splits: Shares of train, val and test.
        dedup: Drop the repeats of a text.
        max_tokens: Stop with the document that reaches this many tokens; all of the source when absent.
        end_of_text: The token that closes each document; the tokenizer's own when absent.
        workers: Processes that tokenise; as many as there are cores when absent.
        check: Verify every checksum and index of this folder, and write nothing.
    """
    from headgate.data import prepare as data
    from headgate.data.progress import print_checked, print_summary
    from headgate.data.shards import check as verify
    from headgate.data.splits import parse_shares

    if check is not None:
        if source is not None:
            raise HeadgateError(f"--check {check} takes no source, but {source!r} was given; leave it out")
        print_checked(verify(check), check)
    elif source is None or out is None:
        raise HeadgateError("prepare needs a source and a folder to write: headgate prepare SOURCE OUT")
    else:
        request = data.Request(
            source, tokenizer, text_column, parse_shares(splits), dedup, max_tokens, end_of_text
        )
        print_summary(data.prepare(request, out, workers=workers), out)


COMMANDS: dict[str, Callable[..., None]] = {"mechanisms": mechanisms, "prepare": prepare}


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
    except KeyboardInterrupt:
        print("headgate: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left, as `| head` does; nothing is wrong here


if __name__ == "__main__":
    main()
