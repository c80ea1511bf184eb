"""Kills at random moments what carries out a study on a cluster, and compares the results with an unharmed
study's.

    python benchmarks/cluster_kills.py --kills 30

Each round runs a small study on a real Slurm or Ray cluster of this machine (tests/compare/engines.py) and
kills, a few times, one of: the command itself, the process of a run, its worker, or all Slurm jobs. The
command is started again whenever it is gone. A round fails if the results differ.
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
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "compare")]
SETTINGS = ["train.steps=60", "train.batch_size=2", "train.context=64", "train.evaluate_every=20"]
SETTINGS += [
    "train.evaluate_tokens=1024",
    "train.warmup_steps=1",
    "--seeds",
    "2",
    "--no-controls",
    "--no-cost",
]


def words(out: Path, data: Path, engine: list[str]) -> list[str]:
    named = ["compare", "local", "--recipe", "tiny", "--data", str(data), "--out", str(out)]
    return [sys.executable, "-m", "headgate", *named, *SETTINGS, *engine]


def judged(out: Path) -> object:
    results = json.loads((out / "results.json").read_text())
    return [[(run["seed"], run["loss"]) for run in variant["runs"]] for variant in results["variants"]]


def holders(out: Path) -> list[int]:
    from headgate.compare.executors.leases import read_holder

    found = (read_holder(folder)[1] for folder in out.glob("leases/*"))
    return [holder.pid for holder in found if holder is not None and holder.ended is None]


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def harm(kind: str, front: subprocess.Popen[bytes], out: Path, environment: dict[str, str]) -> bool:
    """Whether there was something of this kind to kill."""
    if kind == "command":
        front.kill()
        front.wait()
        return True
    if kind == "job":
        return subprocess.run(["scancel", "--me"], env=environment).returncode == 0
    pids = holders(out)
    if kind == "run":
        pids = [child for pid in pids for child in children(pid)]
    for pid in pids[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "worker" else signal.SIGTERM)
            return True
    return False


def round_of_kills(
    engine: str, out: Path, data: Path, wanted: int, environment: dict[str, str], where: list[str]
) -> int:
    kinds = ["command", "worker", "run"] + ["job"] * (engine == "slurm")
    command, done = words(out, data, ["--on", engine, *where]), 0
    front = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        try:
            code = front.wait(random.uniform(2.0, 8.0))
        except subprocess.TimeoutExpired:
            if done < wanted:
                done += harm(random.choice(kinds), front, out, environment)
            continue
        if code == 0:
            return done
        front = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def main() -> int:
    import engines

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--each", type=int, default=5, help="kills in one study")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    done, bad, rounds = 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="kills") as name:
        home, environment = Path(name), dict(os.environ)
        data = home / "data"
        prepare = [sys.executable, "-m", "headgate", "prepare", "stdlib", str(data), "--max-tokens", "200000"]
        subprocess.run(prepare, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        subprocess.run(
            words(home / "here", data, []), check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        expected = judged(home / "here")
        for engine in ("slurm", "ray"):
            begun, of_engine = time.monotonic(), 0
            cluster = engines.slurm(home / "s") if engine == "slurm" else engines.ray(home / "r")
            with cluster as found:
                where = ["--ray-address", str(found)] if engine == "ray" else []
                surroundings = dict(found) if isinstance(found, dict) else environment
                while of_engine < options.kills / 2:
                    rounds += 1
                    out = home / f"{engine}-{rounds}"
                    of_engine += round_of_kills(engine, out, data, options.each, surroundings, where)
                    bad += judged(out) != expected
                    print(f"{engine}: {of_engine} kills, {time.monotonic() - begun:.0f} s", flush=True)
            done += of_engine
    print(f"{done} kills in {rounds} studies; {bad} studies with other results")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
