"""Kill a training run with SIGKILL again and again, and see that nothing is lost but the steps after the last
checkpoint.

    python benchmarks/kill_train.py --kills 60

Runs save at every step, so that many of the kills strike while a checkpoint is being written. After each one
every checkpoint must load and the metrics must read; at its end every run must equal, bit for bit, the one
that was never killed. One process imports torch and forks the runs, so that a start takes no time.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import headgate
from headgate import config
from headgate.config import Config, RunOptions
from headgate.data.prepare import Request, prepare
from headgate.recipes import get_recipe
from headgate.train import checkpoint
from headgate.train.folder import WALL_CLOCK, RunFolder, read_metrics
from headgate.train.loop import train

OPTIONS = RunOptions(save_every=1, keep=2)


def settings(steps: int) -> Config:
    sizes = ["model.vocab_size=257", "model.d_model=64", "model.n_layers=2", "model.d_mlp=96"]
    schedule = [
        "train.context=32",
        "train.batch_size=2",
        "train.evaluate_every=5",
        "train.evaluate_tokens=64",
    ]
    words = [*sizes, *schedule, f"train.steps={steps}", "model.mechanism=dynamic-sparse"]
    return config.override(get_recipe("tiny"), words)


def make_data(home: Path) -> Path:
    draw, source = random.Random(0), home / "texts.jsonl"
    words = ["the", "gate", "at", "head", "of", "a", "channel", "sets", "how", "much", "water"]
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=60))}) + "\n" for _ in range(120))
    source.write_text("".join(lines))
    prepare(Request(str(source), tokenizer="byte"), home / "data", workers=1)
    return home / "data"


def fork_run(asked: Config, data: Path, out: Path) -> int:
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    try:
        train(asked, data, out, OPTIONS)
        os._exit(0)
    except BaseException as error:
        print(f"a run failed: {error!r}", file=sys.stdout, flush=True)
        os._exit(1)


def wait(child: int) -> None:
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("a run that was not killed did not finish")


def inspect(run: RunFolder) -> int:
    """Read all that a user could read of the folder; the last step saved."""
    steps = checkpoint.saved_steps(run)
    for step in steps:
        folder = checkpoint.find(run, str(step))
        headgate.load(folder)
        assert checkpoint.read_state(folder).step == step
    told = [line["step"] for line in read_metrics(run.path)]
    assert told == sorted(set(told))
    assert not steps or told[-1] >= steps[-1], "a checkpoint outlived its metrics"
    return steps[-1] if steps else 0


def outcome(run: Path) -> tuple[list[dict[str, object]], dict[str, torch.Tensor]]:
    lines = [{k: v for k, v in line.items() if k not in WALL_CLOCK} for line in read_metrics(run)]
    return lines, headgate.load(run).state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as home:
        data, asked = make_data(Path(home)), settings(given.steps)
        begun = time.monotonic()
        wait(fork_run(asked, data, Path(home) / "whole"))
        seconds = time.monotonic() - begun
        expected_lines, expected_weights = outcome(Path(home) / "whole")
        kills = in_writing = lost = most_lost = runs = 0
        while kills < given.kills:
            run = RunFolder(Path(home) / f"run-{runs}")
            saved = 0
            while True:
                child = fork_run(asked, data, run.path)
                # Some finish before they are killed, so that the end of a run is struck as well.
                time.sleep(draw.uniform(0, seconds / 3))
                done, _ = os.waitpid(child, os.WNOHANG)
                if done:
                    break
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kills += 1
                in_writing += any(run.checkpoints.glob(".*.tmp"))
                before, saved = saved, inspect(run)
                assert saved >= before, f"step {before} was saved and is lost"
                told = read_metrics(run.path)
                lost_now = (told[-1]["step"] if told else 0) - saved
                lost, most_lost = lost + lost_now, max(most_lost, lost_now)
                if kills >= given.kills:
                    wait(fork_run(asked, data, run.path))
                    break
            lines, weights = outcome(run.path)
            assert lines == expected_lines, "the metrics differ from those of the run never killed"
            for name, tensor in expected_weights.items():
                assert torch.equal(tensor, weights[name]), name
            assert (run.path / "summary.json").is_file()
            assert not list(run.checkpoints.glob(".*"))
            runs += 1
        print(
            f"{kills} kills survived in {runs} runs of {given.steps} steps, {in_writing} of them while a "
            f"checkpoint was being written; steps computed again after a kill: {lost}, at most {most_lost} "
            "at once; every run equals the one never killed, bit for bit"
        )


if __name__ == "__main__":
    main()
