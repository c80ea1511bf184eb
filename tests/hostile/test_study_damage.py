"""Every file of a study and of a suite, damaged in every way: the command refuses it by name in one sentence,
or says exactly what it said before."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from attempts import DAMAGES, as_link, assert_refused, attempt, tree, untouched
from study_examples import asked, asked_suite

from headgate.compare.executors.leases import Lease, read_holder
from headgate.compare.executors.slurm import _read_jobs
from headgate.compare.executors.worker import Task, read_task, write_task
from headgate.compare.study import run_study
from headgate.compare.suite import run_suite
from headgate.errors import HeadgateError
from headgate.files import write_sealed

RUN = "runs/dynamic-sparse/seed-0"
READ = (
    "study.json",
    "config.json",
    "costs.json",
    "claims.json",
    "gates.json",
    "skipping.json",
    f"{RUN}/summary.json",
    f"{RUN}/metrics.jsonl",
    f"{RUN}/documents.safetensors",
)
NOT_READ = (f"{RUN}/config.json", f"{RUN}/data.json")
WRITTEN = ("results.json", "results.md", "report.html")
GONE = ("missing", "folder", "pipe")


def results(folder: Path) -> dict[str, object]:
    """What was found; not the commands, which name the folder."""
    found: dict[str, object] = json.loads((folder / "results.json").read_text())
    return {key: value for key, value in found.items() if key not in ("commands", "digest", "command")}


@pytest.fixture
def copied(study: Path, published: Path, tmp_path: Path) -> Path:
    shutil.copytree(study, tmp_path / "study", ignore=shutil.ignore_patterns("checkpoints"))
    return tmp_path / "study"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", READ)
def test_a_damaged_study_tells_the_truth_or_nothing(
    name: str, damage: str, copied: Path, study: Path
) -> None:
    DAMAGES[damage](copied / name)
    answer = attempt("report", copied)
    if answer.code:
        assert_refused(answer)
        assert Path(name).name in answer.sentence or "not a study" in answer.sentence, answer.sentence
    elif damage in GONE:
        assert_missing_is_told(copied, name)
    else:
        assert results(copied) == results(study)


def assert_missing_is_told(folder: Path, name: str) -> None:
    """A file that is gone may make a result smaller, but never another."""
    found = results(folder)
    if name.endswith("summary.json"):
        variants = cast(list[dict[str, Any]], found["variants"])
        (mine,) = (variant for variant in variants if f"runs/{variant['label']}/" in name)
        assert not any(run["seed"] == 0 and run["state"] == "finished" for run in mine["runs"])
    elif name == "costs.json":
        assert found["costs"] is None
    elif name == "claims.json":
        assert "mine" not in json.dumps(found["claims"])


@pytest.mark.parametrize("damage", ["flip-3", "deep", *GONE])
def test_what_is_not_read_may_be_damaged(damage: str, copied: Path, study: Path) -> None:
    for name in NOT_READ:
        DAMAGES[damage](copied / name)
    assert attempt("report", copied).code == 0
    assert results(copied) == results(study)


@pytest.mark.parametrize("damage", ["flip-3", "deep", "missing", "pipe", "link"])
def test_what_is_written_anew_takes_the_place_of_damage(damage: str, copied: Path, study: Path) -> None:
    outside = {}
    for name in WRITTEN:
        (as_link if damage == "link" else DAMAGES[damage])(copied / name)
        if damage == "link":
            target = (copied / name).resolve()
            outside[target] = target.read_bytes()
    answer = attempt("report", copied)
    assert answer.code == 0, answer.err
    assert results(copied) == results(study)
    assert all((copied / name).is_file() and not (copied / name).is_symlink() for name in WRITTEN)
    assert {target: target.read_bytes() for target in outside} == outside


@pytest.mark.parametrize("name", WRITTEN)
def test_a_folder_is_not_written_over(name: str, copied: Path) -> None:
    DAMAGES["folder"](copied / name)
    assert_refused(attempt("report", copied), name)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_published_page_comes_from_what_was_published(damage: str, published: Path, tmp_path: Path) -> None:
    shutil.copytree(published, tmp_path / "published")
    DAMAGES[damage](tmp_path / "published" / "results.json")
    assert_refused(attempt("report", tmp_path / "published"), "results.json")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["study.json", "config.json", "costs.json", "skipping.json"])
def test_a_damaged_study_is_not_gone_on_with(name: str, damage: str, copied: Path, data: Path) -> None:
    """Nothing is trained on the strength of it, and nothing else is changed."""
    if damage == "missing" and name in ("costs.json", "skipping.json"):
        return  # measured again
    DAMAGES[damage](copied / name)
    before = tree(copied / "runs")
    with pytest.raises(HeadgateError):
        run_study(*asked(copied, data))
    assert tree(copied / "runs") == before


@pytest.fixture
def suite(finished_suite: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished_suite, tmp_path / "suite")
    return tmp_path / "suite"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["plan.json", "costs.json", "config.json", "judged.json", "data/manifest.json", "summary.json"]
)
def test_a_damaged_suite(name: str, damage: str, suite: Path, finished_suite: Path) -> None:
    before = (finished_suite / "suite.json").read_bytes()
    home = next(path.parent for path in suite.glob("*/config.json"))
    path = {
        "plan.json": suite / name,
        "costs.json": suite / name,
        "summary.json": next(home.glob("runs/*/*/summary.json")),
    }.get(name, home / name)
    DAMAGES[damage](path)
    if damage in GONE and name in ("summary.json", "judged.json", "config.json", "costs.json"):
        return  # trained, judged or measured again, which takes a process or gives other digits
    refusal = None
    try:
        assert run_suite(*asked_suite(suite))
    except HeadgateError as error:
        refusal = str(error)
    if refusal is None:
        assert (suite / "suite.json").read_bytes() == before
    else:
        assert any(words in refusal for words in (path.name, "not a suite", "is in use"))


@pytest.fixture(scope="session")
def queued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder with a run queued and held, as far as engines know it."""
    home = tmp_path_factory.mktemp("queued")
    write_task(home, Task("one", "one", ("train",), str(home / "run"), str(home / "log"), end=3))
    write_sealed(home / "queue" / "slurm.json", {"one": "17_0"})
    lease = Lease.take(home / "leases" / "one", engine="test")
    assert lease is not None
    assert lease.beat()
    return home


@pytest.mark.parametrize("damage", [*DAMAGES, "link"])
def test_damaged_queues_and_leases(damage: str, queued: Path, tmp_path: Path) -> None:
    home = tmp_path / "home" / "study"
    shutil.copytree(queued, home)
    if damage == "cut-end":
        return  # nothing but the end of the line is lost
    harm = as_link if damage == "link" else DAMAGES[damage]
    for path in (home / "queue" / "one.json", home / "queue" / "slurm.json"):
        harm(path)
    if damage == "link":
        assert read_task(home, "one").end == 3
    else:
        with pytest.raises(HeadgateError, match=r"one\.json"):
            read_task(home, "one")
    if damage not in ("link", "missing"):
        with pytest.raises(HeadgateError, match=r"slurm\.json"):
            _read_jobs(home)
    lease = home / "leases" / "one"
    harm(lease / "1.json")
    generation, holder = read_holder(lease)
    if damage == "link":
        assert holder is not None
        return
    assert holder is None, "whoever held it is not known, and counts as silent"
    taken = Lease.take(lease, engine="test", silence=0.01)
    assert taken is not None
    assert taken.generation == generation + 1
    assert taken.beat()


@pytest.mark.parametrize("damage", DAMAGES)
def test_status_of_a_damaged_queue(damage: str, copied: Path) -> None:
    path = sorted(copied.glob("queue/*.json"))[0]
    DAMAGES[damage](path)
    answer = attempt("status", copied)
    if damage == "missing":
        assert answer.code == 0  # one run less was queued
    else:
        assert_refused(answer, path.name)


@pytest.mark.parametrize("damage", DAMAGES)
def test_status_believes_the_runs_and_not_their_leases(damage: str, copied: Path) -> None:
    before = json.loads(attempt("status", copied, "--json").out)["counts"]
    for path in copied.glob("leases/*/*.json"):
        DAMAGES[damage](path)
    answer = attempt("status", copied, "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["counts"] == before


def test_nothing_is_written_through_links_in_a_suite(suite: Path, outside: Path) -> None:
    (suite / "elsewhere").symlink_to(outside / "inner")
    with untouched(outside):
        assert attempt("cancel", suite).code == 0


@pytest.mark.parametrize("name", ["runs", "runs/dynamic-sparse", RUN, "logs", "queue", "leases"])
def test_nothing_is_written_through_links_in_a_study(
    name: str, copied: Path, data: Path, outside: Path
) -> None:
    for gone in (RUN, name):  # something is left to train
        shutil.rmtree(copied / gone, ignore_errors=True)
    (copied / name).symlink_to(outside / "inner")
    with untouched(outside), pytest.raises(HeadgateError, match="is a link"):
        run_study(*asked(copied, data))


def test_claims_are_judged_by_what_they_were(copied: Path) -> None:
    """Claims edited behind the study's back are damage, like everything else that is sealed."""
    values = json.loads((copied / "claims.json").read_text())
    values["claims"][0]["printed"] = "1.0"
    (copied / "claims.json").write_text(json.dumps(values))
    assert_refused(attempt("report", copied), "claims.json")
