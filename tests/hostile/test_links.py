"""A folder from somebody else: links, pipes and folders where files of ours should be.

Whatever happens, nothing outside the folder changes; what cannot be written to is refused in one sentence.
"""

import os
import shutil
from pathlib import Path

import pytest
from attempts import assert_refused, attempt, untouched

from headgate.data import workers
from headgate.data.prepare import Request, prepare

KINDS = ("link", "folder-link", "hard-link", "nowhere", "pipe", "folder")


def put(path: Path, kind: str, outside: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(outside / "file")
    elif kind == "folder-link":
        path.symlink_to(outside / "inner")
    elif kind == "hard-link":
        os.link(outside / "file", path)
    elif kind == "nowhere":
        path.symlink_to(outside / "made-by-a-link")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_what_a_run_adds_to(kind: str, name: str, stopped: Path, outside: Path) -> None:
    put(stopped / name, kind, outside)
    with untouched(outside):
        answer = attempt("train", "--out", stopped)
    if (name, kind) == (".lock", "hard-link") or name == "metrics.jsonl" or kind != "hard-link":
        assert_refused(answer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/step-00000003", "checkpoints/.step-00000003.tmp"]
)
def test_folders_of_a_run(kind: str, name: str, stopped: Path, outside: Path) -> None:
    if kind == "folder" and not name.endswith(".tmp"):
        pytest.skip("an empty folder of that name is what a run begins with")
    put(stopped / name, kind, outside)
    with untouched(outside):
        answer = attempt("train", "--out", stopped)
    if name.endswith(".tmp"):
        assert answer.code == 0, answer.err  # a leftover, removed
    else:
        assert_refused(answer)


@pytest.mark.parametrize("kind", ["link", "folder-link", "nowhere", "pipe", "folder"])
@pytest.mark.parametrize("name", ["config.json", "data.json", "tokenizer.json", "summary.json", ".lock"])
def test_a_new_run_in_a_folder_that_is_prepared_for_it(
    kind: str, name: str, recipe: Path, data: Path, tmp_path: Path, outside: Path
) -> None:
    (tmp_path / "run").mkdir()
    put(tmp_path / "run" / name, kind, outside)
    with untouched(outside):
        answer = attempt("train", recipe, "--data", data, "--out", tmp_path / "run", "train.steps=1")
    assert answer.code in (0, 2)
    if answer.code:
        assert_refused(answer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tensorboard"])
def test_where_trackers_write(kind: str, name: str, stopped: Path, outside: Path) -> None:
    pytest.importorskip("tensorboard")
    if kind == "folder":
        pytest.skip("that is where it writes")
    put(stopped / name, kind, outside)
    with untouched(outside):
        assert_refused(attempt("train", "--out", stopped, "--track", name))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepare that was stopped by a bad line: its folder, and the source beside it."""
    home = tmp_path_factory.mktemp("half")
    lines = [f'{{"text": "document {n} of many words"}}\n' for n in range(50)]
    (home / "in.jsonl").write_text("".join(lines) + "{\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "CHUNK_CHARACTERS", 100)
        assert attempt("prepare", home / "in.jsonl", home / "out", "--tokenizer", "byte", "--dedup").code == 2
    assert (home / "out" / "progress.json").is_file()
    return home


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "keys.tmp",
        "train",
        "val",
        "train/00000.ds.tmp",
        "train/00000.ds.index.tmp",
        "train/00001.ds.tmp",
    ],
)
def test_what_prepare_adds_to(kind: str, name: str, half: Path, tmp_path: Path, outside: Path) -> None:
    shutil.copytree(half / "out", tmp_path / "out")
    put(tmp_path / "out" / name, kind, outside)
    with untouched(outside):
        answer = attempt("prepare", half / "in.jsonl", tmp_path / "out", "--tokenizer", "byte", "--dedup")
    assert_refused(answer)


@pytest.mark.parametrize("kind", ["link", "folder-link", "nowhere", "pipe", "hard-link"])
@pytest.mark.parametrize("name", ["progress.json", "sources.jsonl", "tokenizer.json", "manifest.json"])
def test_small_files_of_prepare(kind: str, name: str, half: Path, tmp_path: Path, outside: Path) -> None:
    shutil.copytree(half / "out", tmp_path / "out")
    put(tmp_path / "out" / name, kind, outside)
    with untouched(outside):
        answer = attempt("prepare", half / "in.jsonl", tmp_path / "out", "--tokenizer", "byte", "--dedup")
    assert_refused(answer)


def test_links_in_a_folder_that_is_emptied_first(tmp_path: Path, outside: Path) -> None:
    """One that was begun and has no document yet is emptied; not what its splits are links to."""
    (tmp_path / "in.txt").write_text("text")
    out = tmp_path / "out"
    out.mkdir()
    (out / "progress.json").write_text('{"request": {}}')
    (out / "train").symlink_to(outside / "inner")
    with untouched(outside):
        assert_refused(attempt("prepare", tmp_path / "in.txt", out, "--tokenizer", "byte"), "is a link")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja"])
def test_convert_does_not_pass_on_what_a_link_leads_to(
    name: str, whole: Path, tmp_path: Path, outside: Path
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    put(tmp_path / "run" / name, "link", outside)
    assert_refused(attempt("convert", tmp_path / "run", tmp_path / "out"), name, "is a link")
    assert not (tmp_path / "out").exists()


def test_convert_follows_the_links_of_the_hub_s_cache(whole: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    assert attempt("convert", whole, tmp_path / "plain").code == 0
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "plain").iterdir():
        shutil.move(path, blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    answer = attempt("convert", snapshot, tmp_path / "out")
    assert answer.code == 0, answer.err
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()


def test_data_behind_links_is_read(data: Path, tmp_path: Path) -> None:
    """Reading follows links: data often lies on another disk."""
    shutil.copytree(data, tmp_path / "real")
    (tmp_path / "data").mkdir()
    for path in (tmp_path / "real").iterdir():
        (tmp_path / "data" / path.name).symlink_to(path)
    assert attempt("prepare", "--check", tmp_path / "data").code == 0


def test_two_names_for_one_output(tmp_path: Path) -> None:
    """OUT itself may be a link: whoever gives it means what it leads to."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    (tmp_path / "in.txt").write_text("text")
    prepare(Request(str(tmp_path / "in.txt"), "byte", splits=(1, 0, 0)), tmp_path / "out", workers=1)
    assert (tmp_path / "disk" / "manifest.json").is_file()
