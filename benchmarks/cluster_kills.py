"""Kills at random moments what carries out a study on a cluster, and compares the results with an unharmed
study's.

    python benchmarks/cluster_kills.py --kills 30

Each round runs a small study on a real Slurm or Ray cluster of this machine (tests/compare/engines.py) and
kills, a few times, one of: the command itself, the process of a run, its worker, all Slurm jobs, a Ray node.
The command is started again whenever it is gone. A round fails if the results differ, or if a run lacks a
step or has one twice.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "compare")]
STEPS = 60
SETTINGS = [f"train.steps={STEPS}", "train.batch_size=2", "train.context=64", "train.evaluate_every=20"]
SETTINGS += ["train.evaluate_tokens=1024", "train.warmup_steps=1"]
SETTINGS += ["--seeds", "2", "--no-controls", "--no-cost"]


def words(out: Path, data: Path, engine: list[str]) -> list[str]:
    named = ["compare", "local", "--recipe", "tiny", "--data", str(data), "--out", str(out)]
    return [sys.executable, "-m", "headgate", *named, *SETTINGS, *engine]


def judged(out: Path) -> object:
    """What the study found, and which steps each of its runs has noted."""
    results = json.loads((out / "results.json").read_text())
    losses = [[(run["seed"], run["loss"]) for run in variant["runs"]] for variant in results["variants"]]
    noted = {}
    for metrics in out.glob("runs/*/*/metrics.jsonl"):
        noted[str(metrics.relative_to(out))] = [
            json.loads(line)["step"] for line in metrics.read_text().splitlines()
        ]
    return losses, noted


class Harm:
    """Kills, and notes how long it takes until a run whose worker was killed is taken up."""

    def __init__(self, engine: str, cluster: Any, environment: dict[str, str]) -> None:
        self.cluster, self.environment = cluster, environment
        self.kinds = ["command", "worker", "run", "job" if engine == "slurm" else "node"]
        self.done: Counter[str] = Counter()
        self.taken_up: list[float] = []
        self._orphans: dict[Path, tuple[int, float]] = {}

    def strike(self, front: subprocess.Popen[bytes], out: Path) -> None:
        kind = random.choice(self.kinds)
        if getattr(self, f"_{kind}")(front, out):
            self.done[kind] += 1

    def watch(self) -> None:
        from headgate.compare.executors.leases import read_holder

        for folder, (generation, since) in list(self._orphans.items()):
            if read_holder(folder)[0] > generation:
                self.taken_up.append(time.monotonic() - since)
                del self._orphans[folder]

    def _command(self, front: subprocess.Popen[bytes], out: Path) -> bool:
        front.kill()
        front.wait()
        return True

    def _job(self, front: subprocess.Popen[bytes], out: Path) -> bool:
        listed = ["squeue", "--me", "--noheader"]
        queued = subprocess.run(listed, env=self.environment, capture_output=True).stdout
        subprocess.run(["scancel", "--me"], env=self.environment, check=True)
        return bool(queued)

    def _node(self, front: subprocess.Popen[bytes], out: Path) -> bool:
        node = random.choice(sorted(self.cluster.worker_nodes, key=lambda node: node.unique_id))
        self.cluster.remove_node(node, allow_graceful=False)
        self.cluster.add_node(num_cpus=1)
        return True

    def _worker(self, front: subprocess.Popen[bytes], out: Path) -> bool:
        found = list(holders(out).items())
        if not found:
            return False
        folder, (generation, pid) = random.choice(found)
        self._orphans[folder] = generation, time.monotonic()
        return killed(pid, signal.SIGKILL)

    def _run(self, front: subprocess.Popen[bytes], out: Path) -> bool:
        found = [child for _, pid in holders(out).values() for child in children(pid)]
        return bool(found) and killed(random.choice(found), signal.SIGTERM)


def holders(out: Path) -> dict[Path, tuple[int, int]]:
    """By lease, the generation and the process of whoever has it and lives."""
    from headgate.compare.executors.leases import is_free, read_holder

    found = {}
    for folder in out.glob("leases/*"):
        generation, holder = read_holder(folder)
        if holder is not None and not is_free(holder):
            found[folder] = generation, holder.pid
    return found


def children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):  # a worker on Ray starts its run from a thread
        with suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def killed(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def round_of_kills(command: list[str], out: Path, harm: Harm, wanted: int) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=harm.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    before, front = harm.done.total(), start()
    strike_at = time.monotonic() + random.uniform(2.0, 12.0)
    while True:
        with suppress(subprocess.TimeoutExpired):
            if front.wait(0.2) == 0:
                return
            front = start()
        harm.watch()
        if time.monotonic() > strike_at and harm.done.total() < before + wanted:
            harm.strike(front, out)
            strike_at = time.monotonic() + random.uniform(1.0, 10.0)


def main() -> int:
    import engines

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--each", type=int, default=8, help="kills in one study")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on", choices=("slurm", "ray"), nargs="+", default=("slurm", "ray"))
    options = parser.parse_args()
    random.seed(options.seed)
    bad, rounds, done, taken_up = 0, 0, Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="kills") as name:
        home, environment = Path(name), dict(os.environ)
        data = home / "data"
        quiet: Any = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        prepare = ["prepare", "stdlib", str(data), "--max-tokens", "200000"]
        subprocess.run([sys.executable, "-m", "headgate", *prepare], **quiet)
        subprocess.run(words(home / "here", data, []), **quiet)
        expected = judged(home / "here")
        for engine in options.on:
            begun = time.monotonic()
            starter = engines.slurm_cluster if engine == "slurm" else engines.ray_cluster
            with starter(home / engine[0]) as cluster:
                harm = Harm(engine, cluster, cluster if engine == "slurm" else environment)
                where = ["--ray-address", cluster.address] if engine == "ray" else []
                while harm.done.total() < options.kills / len(options.on):
                    rounds += 1
                    out = home / f"{engine}-{rounds}"
                    command = words(out, data, ["--on", engine, *where])
                    round_of_kills(command, out, harm, options.each)
                    bad += judged(out) != expected
                    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(harm.done.items()))
                    print(f"{engine}: {kinds}; {time.monotonic() - begun:.0f} s; {bad} bad", flush=True)
            done += harm.done
            taken_up += harm.taken_up
    print(f"{done.total()} kills in {rounds} studies; {bad} studies with other results")
    if taken_up:
        print(f"a run whose worker was killed was taken up within {max(taken_up):.0f} s at most")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
