"""Kill prepare, train and compare with SIGKILL again and again, and see that nothing is lost but the work
since the last note of progress.

    python benchmarks/kill.py --kills 1000

After each kill all that a user could read must read, and no step or document that was saved may be gone; at
its end every result must equal, bit for bit, the one that was never killed. Training saves at every step and
prepare notes every chunk, so that many of the kills strike while files are being written. One process imports
torch and forks all that is struck, so that a start takes no time. A compare is killed by turns with all of
its runs or alone, and its runs then have to end by themselves.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import headgate
from headgate import config
from headgate.compare import study
from headgate.compare.executors import worker
from headgate.config import Config
from headgate.data import prepare as preparing
from headgate.data import shards, workers
from headgate.data.folder import PrepareState
from headgate.options import RunOptions, StudyOptions
from headgate.recipes import get_recipe
from headgate.train import checkpoint
from headgate.train.folder import WALL_CLOCK, RunFolder, read_metrics
from headgate.train.loop import train

OPTIONS = RunOptions(save_every=1, keep=2)
SHARES = {"train": 0.4, "prepare": 0.5, "compare": 0.1}
"""Of the kills; a compare takes longest."""


def settings(steps: int) -> Config:
    sizes = ["model.vocab_size=257", "model.d_model=64", "model.n_layers=2", "model.d_mlp=96"]
    schedule = ["context=32", "batch_size=2", "evaluate_every=5", "evaluate_tokens=64", f"steps={steps}"]
    words = [*sizes, *(f"train.{word}" for word in schedule), "model.mechanism=dynamic-sparse"]
    return config.override(get_recipe("tiny"), words)


def make_source(home: Path, documents: int) -> Path:
    draw, source = random.Random(0), home / f"texts-{documents}.jsonl"
    words = ["the", "gate", "at", "head", "of", "a", "channel", "sets", "how", "much", "water"]
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=60))}) + "\n" for _ in range(documents))
    source.write_text("".join(lines))
    return source


def forked(act: Callable[[], Any]) -> int:
    """A process that acts and ends with 0, in a group of its own."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    try:
        act()
        os._exit(0)
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    except BaseException:
        print(f"a process failed: {traceback.format_exc()}", flush=True)
        os._exit(1)


@dataclass
class Target:
    """Something to kill: how it is run into a folder, what is saved there, and what the end must equal."""

    name: str
    run: Callable[[Path], Any]
    saved: Callable[[Path], int]
    """How much, which must never become less; raises if anything does not read."""
    result: Callable[[Path], Any]
    in_writing: Callable[[Path], bool]


def saved_steps(folder: Path) -> int:
    """Read all that a user could read of a run; its last step saved."""
    run = RunFolder(folder)
    steps = checkpoint.saved_steps(run)
    for step in steps:
        here = checkpoint.find(run, str(step))
        headgate.load(here)
        assert checkpoint.read_state(here).step == step
    steps_logged = [line["step"] for line in read_metrics(folder)]
    assert steps_logged == sorted(set(steps_logged))
    assert not steps or steps_logged[-1] >= steps[-1], "a checkpoint outlived its metrics"
    assert not list(run.checkpoints.glob("damaged-*")), "a checkpoint was found damaged"
    return steps[-1] if steps else 0


def run_result(folder: Path) -> tuple[Any, ...]:
    assert (folder / "summary.json").is_file()
    assert not list((folder / "checkpoints").glob(".*"))
    lines = [{k: v for k, v in line.items() if k not in WALL_CLOCK} for line in read_metrics(folder)]
    last = checkpoint.find(RunFolder(folder))
    return lines, [(last / name).read_bytes() for name in (checkpoint.MODEL, checkpoint.TRAINING)]


def saved_documents(folder: Path) -> int:
    if (folder / "manifest.json").is_file():
        manifest = shards.check_data(folder)
        assert manifest is not None
        return sum(split.documents for split in manifest.splits)
    note = folder / "progress.json"
    return config.load(PrepareState, note).now.documents if note.is_file() else 0


def folder_result(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def saved_in_study(folder: Path) -> int:
    runs = sorted(folder.glob("runs/*/seed-*"))
    return sum(saved_steps(run) for run in runs)


def study_result(folder: Path) -> dict[str, Any]:
    return {str(run.relative_to(folder)): run_result(run) for run in sorted(folder.glob("runs/*/seed-*"))}


def end_orphans(folder: Path) -> None:
    """Runs whose compare is gone end by themselves; wait for that."""
    for _ in range(6000):
        mine = [pid for pid in os.listdir("/proc") if pid.isdecimal() and _works_in(int(pid), folder)]
        if not mine:
            return
        time.sleep(0.05)
    raise AssertionError(f"runs outlived the compare that had started them: {mine}")


def _works_in(pid: int, folder: Path) -> bool:
    """Whether a process holds a file of the folder open."""
    try:
        files = Path(f"/proc/{pid}/fd").iterdir()
        return any(os.readlink(file).startswith(str(folder)) for file in files)
    except OSError:
        return False


def campaign(target: Target, home: Path, kills: int, draw: random.Random) -> str:
    """Kill and go on until that many kills are done; what there is to say about it."""
    seconds = math.inf
    for name in ("whole", "again"):  # the machine may have been busy with something else at the first
        begun = time.monotonic()
        assert os.waitpid(forked(lambda name=name: target.run(home / name)), 0)[1] == 0, "it does not run"
        seconds = min(seconds, time.monotonic() - begun)
    expected = target.result(home / "whole")
    assert target.result(home / "again") == expected, "two runs that were never killed differ"
    done = in_writing = results = 0
    while done < kills:
        folder, saved, spared = home / f"{target.name}-{results}", 0, False
        while not spared:
            child = forked(lambda folder=folder: target.run(folder))
            if done >= kills:
                assert os.waitpid(child, 0)[1] == 0, "what was not killed did not end well"
                break
            # Some end before they are struck, so that the end of the work is struck as well. Every other
            # stroke waits for a file that is being written.
            strike = time.monotonic() + draw.uniform(0, seconds / 3)
            latest = strike + (seconds if draw.random() < 0.5 else 0)
            while not spared and (now := time.monotonic()) < latest:
                if now >= strike and target.in_writing(folder):
                    break
                time.sleep(0.0005)
                spared = bool(os.waitpid(child, os.WNOHANG)[0])
            if spared:
                break
            # A compare alone, or with all of its runs.
            struck = [child, *(worker._descendants(child) if done % 2 else [])]
            for pid in struck:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(child, 0)
            done += 1
            end_orphans(folder)
            in_writing += target.in_writing(folder)
            before, saved = saved, target.saved(folder)
            assert saved >= before, f"{before} were saved, and {saved} are left"
        assert target.result(folder) == expected, f"{folder.name} differs from what was never killed"
        results += 1
    return f"{target.name}: {done} kills over {results} results, {in_writing} while writing; nothing lost"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60, help="over all")
    parser.add_argument("--steps", type=int, default=30, help="of a run")
    parser.add_argument("--only", choices=list(SHARES), help="strike this alone")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    workers.CHUNK_CHARACTERS, preparing.COMMIT_SECONDS = 2000, 0.0
    with tempfile.TemporaryDirectory() as name:
        home = Path(name).resolve()
        asked = settings(given.steps)
        config.save(asked, home / "recipe.json")
        request = preparing.Request(str(make_source(home, 600)), tokenizer="byte", dedup=True)
        small = preparing.Request(str(make_source(home, 120)), tokenizer="byte")
        preparing.prepare(small, home / "data", workers=1)
        options = StudyOptions(
            recipe=str(home / "recipe.json"), seeds="2", jobs=2, cost=False, controls=False
        )
        targets = [
            Target(
                "train",
                lambda out: train(asked, home / "data", out, OPTIONS),
                saved_steps,
                run_result,
                lambda out: any((out / "checkpoints").glob(".*.tmp")),
            ),
            Target(
                "prepare",
                lambda out: preparing.prepare(request, out, workers=2),
                saved_documents,
                folder_result,
                lambda out: any(out.glob(".*.tmp")),
            ),
            Target(
                "compare",
                lambda out: study.run_study(["local"], home / "data", out, ["train.steps=6"], options),
                saved_in_study,
                study_result,
                lambda out: any(out.glob("runs/*/seed-*/checkpoints/.*.tmp")),
            ),
        ]
        for target in targets:
            share = 1.0 if given.only == target.name else 0.0 if given.only else SHARES[target.name]
            if round(share * given.kills):
                (home / target.name).mkdir()
                print(campaign(target, home / target.name, round(share * given.kills), draw), flush=True)


if __name__ == "__main__":
    main()
