"""What `headgate prepare` prints at the end: the splits of a folder."""

from rich.console import Console
from rich.table import Table

from headgate.data.shards import Manifest


def print_summary(manifest: Manifest, folder: str) -> None:
    table = Table("split", "documents", "MB of text", "tokens", "bytes per token", "shards")
    for column in table.columns[1:]:
        column.justify = "right"
    for split in manifest.splits:
        ratio = f"{split.bytes / split.tokens:.2f}" if split.tokens else ""
        table.add_row(
            split.name,
            f"{split.documents:,}",
            f"{split.bytes / 1e6:.2f}",
            f"{split.tokens:,}",
            ratio,
            str(len(split.shards)),
        )
    Console().print(table)
    vocabulary, repeats = manifest.tokenizer.vocab_size, manifest.repeats_dropped
    print(f"{folder}: a vocabulary of {vocabulary:,} entries; {repeats:,} repeats were dropped")


def print_checked(manifest: Manifest | None, folder: str) -> None:
    if manifest is None:
        print(f"{folder}: sizes and indexes are sound; there is no manifest, so no checksums to verify")
    else:
        print_summary(manifest, folder)
        print(f"{folder}: every checksum and index is sound")
