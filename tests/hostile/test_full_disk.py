"""A disk that is full: one sentence, and nothing half-written. A small file system in memory plays the disk,
where the system lets one be mounted."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attempts import assert_refused, attempt, tree

ROOM = 6 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Six megabytes."""
    home = tmp_path / "disk"
    home.mkdir()
    mount = shutil.which("mount")
    words = [mount or "mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(home)]
    if (
        not sys.platform.startswith("linux")
        or not mount
        or subprocess.run(words, capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    try:
        yield home
    finally:
        subprocess.run(["umount", "--lazy", str(home)], check=True)


def fill(disk: Path, *, leave: int = 0) -> None:
    """All of the disk but so many bytes."""
    left = shutil.disk_usage(disk).free - leave
    (disk / "fill").write_bytes(bytes(max(left, 0)))


@pytest.mark.parametrize("leave", [0, 4096, 12288, 65536])
@pytest.mark.parametrize(
    "row",
    [
        "prepare {text} {disk}/out --tokenizer byte",
        "train {recipe} --data {data} --out {disk}/out --save-every 1",
        "convert {run} {disk}/out",
        "bench --lengths 32 --mechanisms local --no-memory --no-peers --seconds 0.01 --json {disk}/out",
    ],
    ids=lambda row: row.split()[0],
)
def test_a_new_folder_on_a_full_disk(
    row: str, leave: int, disk: Path, data: Path, whole: Path, recipe: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{"a document " * 40}{n}"}}\n' for n in range(300)))
    fill(disk, leave=leave)
    places = {"text": text, "disk": disk, "recipe": recipe, "data": data, "run": whole}
    answer = attempt(*row.format(**places).split())
    if answer.code == 0:  # so little fits into what was left
        return
    assert_refused(answer, "No space left")
    left = {path for path in tree(disk) if path.endswith(".tmp")}
    assert not left
    (disk / "fill").unlink()
    assert attempt(*row.format(**places).split()).code == 0, "with room again, the same command works"


@pytest.mark.parametrize("leave", [0, 8192])
@pytest.mark.parametrize("command", ["report {study}", "report {study} --publish {disk}/published"])
def test_a_report_on_a_full_disk(command: str, leave: int, disk: Path, study: Path, tmp_path: Path) -> None:
    """Its results stay what they were."""
    home = disk / "study" if "publish" not in command else tmp_path / "study"
    shutil.copytree(study, home, ignore=lambda _, names: [n for n in names if n == "checkpoints"])
    before = tree(home)
    fill(disk, leave=leave)
    words = command.format(study=home, disk=disk).split()
    assert_refused(attempt(*words), "No space left")
    assert not (disk / "published").exists()
    for name, digest in before.items():
        assert tree(home).get(name) == digest or name.startswith(("results", "report")), name
    (disk / "fill").unlink()
    assert attempt(*words).code == 0


def test_a_study_on_a_full_disk(disk: Path, data: Path, recipe: Path) -> None:
    words = ("compare", "local", "--data", data, "--out", disk / "study", "--recipe", recipe)
    words = (*words, "--seeds", "1", "--no-cost", "--no-controls")
    fill(disk, leave=8192)
    answer = attempt(*words)
    assert answer.code in (1, 2), answer
    assert "No space left" in answer.err
    assert "Traceback" not in answer.err
