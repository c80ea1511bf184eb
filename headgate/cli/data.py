"""`headgate prepare`: from text to token shards."""

from pathlib import Path

from headgate.cli.arguments import refuse_given
from headgate.errors import HeadgateError


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
    separator: str | None = None,
    workers: int | None = None,
    check: str | None = None,
) -> None:
    """Turn text into token shards, or verify the shards of a folder with --check.

    Args:
        source: 'stdlib', a file, a folder, a glob, a URL such as hf://datasets/HuggingFaceFW/fineweb, or a
            synthetic task such as mqar:pairs=8,length=256; docs/tasks.md lists them.
        out: The folder to write. Run the same command again to continue an interrupted prepare.
        tokenizer: 'byte', 'bpe:N', a tokenizer.json, GPT-2's vocab.json and merges.txt, a folder that holds
            one of them, or a name on the Hugging Face Hub.
        text_column: The column or key that holds the text in parquet and JSON files.
        splits: Shares of the train, val and test splits.
        dedup: Drop repeated texts.
        max_tokens: Stop after the document that reaches this many tokens. Default: read the whole source.
        end_of_text: The token that closes each document. Default: the tokenizer's own.
        separator: The text between two documents of a .txt, .md or .py file, such as '\\n\\n'. Default: a
            file is one document.
        workers: Threads that tokenise. Default: one per core.
        check: Verify every checksum and index in this folder; nothing is written.
    """
    from headgate.data import prepare as data
    from headgate.data.shards import check_data
    from headgate.data.splits import parse_shares
    from headgate.data.tables import print_checked, print_summary
    from headgate.data.tasks.contract import parse_task
    from headgate.data.tasks.writing import prepare_task

    for_text = {"tokenizer": tokenizer, "text_column": text_column, "dedup": dedup, "max_tokens": max_tokens}
    for_text |= {"end_of_text": end_of_text, "separator": separator, "workers": workers}
    if check is not None:
        if source is not None:
            raise HeadgateError(
                f"--check {check} does not take a source, but {source!r} was given; leave it out"
            )
        refuse_given(prepare, f"--check {check}", for_text | {"splits": splits})
        print_checked(check_data(check), check)
    elif source is None or out is None:
        raise HeadgateError("prepare needs a source and a folder to write: headgate prepare SOURCE OUT")
    else:
        shares, task = parse_shares(splits), parse_task(source)
        if task is not None:
            refuse_given(prepare, f"source {source!r}", for_text)
            print_summary(prepare_task(task, source, Path(out), shares), out)
            return
        request = data.Request(
            source, tokenizer, text_column, shares, dedup, max_tokens, end_of_text, _written(separator)
        )
        print_summary(data.prepare(request, out, workers=workers), out)


def _written(separator: str | None) -> str | None:
    r"""A separator with \n and \t replaced by the characters they stand for, which are hard to type."""
    return separator and separator.replace("\\n", "\n").replace("\\t", "\t")
