"""Small sources made on the spot, and what the tests of the data share."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ["the", "gate", "of", "a", "channel", "sets", "how", "much", "water", "goes", "—", "élan", "水", "🌊"]
Run = Callable[..., tuple[int, str, str]]
"""Runs a command line: exit code, output and errors."""


def make_texts(count: int, seed: int = 0, words: int = 40) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, 2 * words))) for _ in range(count)]


def write_parquet(path: Path, texts: list[str], *, row_group: int = 10, column: str = "text") -> None:
    table = pa.table({"id": [str(number) for number in range(len(texts))], column: texts})
    pq.write_table(table, path, row_group_size=row_group, compression="zstd")


def write_mixed(folder: Path, count: int = 120) -> list[str]:
    """A folder with every kind of file, repeats among the texts; returns them in the order of reading."""
    texts = make_texts(count - 10)
    texts += texts[:10]
    parts = [texts[number::6] for number in range(6)]
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in part) for part in parts]
    (folder / "a.jsonl").write_text(lines[0] + "\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[1].encode()))
    (folder / "c.jsonl.zst").write_bytes(pa.compress(lines[2].encode(), codec="zstd", asbytes=True))
    write_parquet(folder / "d.parquet", parts[3], row_group=7)
    for kind, part in (("md", parts[4]), ("txt", parts[5])):
        (folder / f"e_{kind}").mkdir(exist_ok=True)
        for number, text in enumerate(part):
            (folder / f"e_{kind}" / f"{number:03d}.{kind}").write_bytes(text.encode())
    (folder / "ignored.bin").write_bytes(b"\xff")
    return [text for part in parts for text in part]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
