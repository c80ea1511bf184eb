"""What commands are told beside what a run is: how it is carried out, how and where runs are compared."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headgate.config import require_at_least
from headgate.errors import HeadgateError
from headgate.grammar import split_assignments


def parse_lengths(text: str, name: str = "lengths") -> tuple[int, ...]:
    """Context lengths as every command takes them: `1024,4096`; an empty text means none."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and len(part) < 16 and int(part) for part in parts):
        raise HeadgateError(f"{name}={text!r} must be whole numbers above 0, written as 1024,4096")
    lengths = tuple(map(int, parts))
    require_distinct(lengths, name)
    return lengths


def require_distinct(values: Sequence[Any], what: str) -> None:
    twice = next((value for n, value in enumerate(values) if value in values[:n]), None)
    if twice is not None:
        raise HeadgateError(f"{what} has {twice!r} twice; leave one out")


MOST_SEEDS = 1000
"""Seeds from here on are for tuning, and are not judged."""


def parse_seeds(text: str | int) -> tuple[int, ...]:
    """`5`: five seeds, judged once. `4..12`: judged after 4, 8 and 12. `4,6,12`: after those."""
    text = str(text)
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            looks = (*range(first, min(last, MOST_SEEDS), max(1, first)), last)
            rising = first < last
        else:
            looks = tuple(int(part) for part in text.split(","))
            rising = all(a < b for a, b in itertools.pairwise(looks))
    except ValueError:
        looks, rising = (), False
    if not looks or not rising or looks[0] < 1:
        raise HeadgateError(
            f"seeds={text!r} is not a number of seeds; write 5, or 4..12 to look after 4, 8 and 12"
        )
    if looks[-1] > MOST_SEEDS:
        raise HeadgateError(f"seeds={text!r} is too many; expected at most {MOST_SEEDS}")
    if len(looks) > 1 and looks[0] < 2:
        raise HeadgateError(f"seeds={text!r} looks after one seed, which shows nothing; start with 2 or more")
    return looks


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out: what may change when it is resumed, because it does not affect the result."""

    save_every: int | None = None
    """Save a checkpoint every N steps, in addition to --save-minutes."""
    save_minutes: float = 10.0
    """Save a checkpoint after this many minutes; the best evaluation and the last step are always saved."""
    keep: int = 2
    """How many of the latest checkpoints to keep, besides the best one."""
    until: int | None = None
    """Stop after this step, with a checkpoint; the schedule remains that of the whole run, to be resumed."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite: stop, or skip the step and count it."""
    recompute: bool = False
    """Recompute each layer in the backward pass instead of keeping what it needs, so that long sequences
    fit."""
    compile: bool = False
    """Compile the layers with torch.compile."""
    shard: bool = False
    """Under torchrun, shard the weights across the processes (FSDP2) instead of copying them (DDP)."""
    device: str | None = None
    """A device such as cpu or cuda. Default: the GPU if there is one."""
    track: tuple[str, ...] = ()
    """Further places to log metrics: tensorboard, wandb, trackio."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "save_every", "keep", "log_every", "until")
        if not 0 < self.save_minutes < math.inf:
            raise HeadgateError(f"save_minutes={self.save_minutes} must be above 0 and finite")


@dataclass(frozen=True)
class StudyOptions:
    """The conditions under which a study compares its variants."""

    recipe: str = "tiny"
    """A recipe such as tiny, or a config.json."""
    seeds: str = "3"
    """How many seeds, from the recipe's own on; each trains every variant. 4..12 looks at the results after
    4, 8 and 12 seeds, and trains no more seeds of a variant once its verdict is clear."""
    tune: int = 0
    """Trials for each variant over --space, on seeds that are not judged; 0 keeps all as published."""
    space: str = ""
    """What to tune, as in train.learning_rate=1e-3..1e-2, or among choices, as in
    model.rope_theta=[100,10000]; separate several by commas. Default: learning rate, attention_output_rate
    and rope_theta around the recipe's values, and what a mechanism declares."""
    tuning_seeds: int = 1
    """Runs of each trial, each on a seed of its own; trials are compared by their mean. One seed is a noisy
    judge of settings that are close."""
    published: bool = True
    """Judge all variants as published too, beside what --tune makes of them."""
    ladder: str = ""
    """Multiples of the budget at which the baseline is trained too, as in 0.25,1,4, so that a difference can
    be priced in compute."""
    ladder_variants: tuple[str, ...] = ()
    """Labels of other variants to train at those budgets too, to see how their differences change; or all."""
    controls: bool = True
    """Train two controls, no attention and a short window, which show what the study can tell."""
    budget: Literal["tokens", "seconds"] = "tokens"
    """What is equal for all: the tokens of a run, or its seconds as measured before training."""
    jobs: int | None = None
    """Runs at once. Default: as many as the cores allow."""
    threads: int = 1
    """Threads per run."""
    lengths: str = ""
    """Context lengths to measure cost at, as in 1024,4096. Default: 1, 4 and 16 times the training
    context."""
    cost: bool = True
    """Measure speed, memory and decoding, separately from training."""
    cost_seconds: float = 1.0
    """Roughly how long a variant's speed is measured at each length, within 5 to 20 rounds."""
    dry_run: bool = False
    """Print the expected runs, tokens and hours, and start nothing."""
    claims: str | None = None
    """A JSON file of a paper's claims, to show beside what is measured; docs/comparing.md has the format."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "jobs", "threads", "tuning_seeds")
        require_at_least(self, 0, "tune")
        if self.tune == 1:
            raise HeadgateError("tune=1 is a single trial, the recipe as it is; give 2 or more, or 0")
        if self.ladder_variants and not self.ladder:
            raise HeadgateError("--ladder-variants needs a ladder of budgets; give --ladder 0.25,1,4 as well")
        if not self.tune and (self.space or self.tuning_seeds > 1 or not self.published):
            raise HeadgateError(
                "--space, --tuning-seeds and --no-published are for tuning; give --tune N as well"
            )
        parse_seeds(self.seeds)
        if not 0 < self.cost_seconds < math.inf:
            raise HeadgateError(f"cost_seconds={self.cost_seconds} is no time to measure; it must be above 0")
        parse_lengths(self.lengths)


@dataclass(frozen=True)
class SuiteOptions:
    """How the suite compares mechanisms."""

    tasks: str = ""
    """Tasks, separated by spaces, with options that differ from the suite's: 'mqar markov:order=2'.
    Default: all."""
    rates: str = "0.003,0.01,0.03"
    """Learning rates to try for every variant; with a single one there is no tuning."""
    tuning_seeds: int = 1
    """Runs at each learning rate."""
    seeds: int | None = None
    """Fresh runs at the best learning rate, which are judged. Default: 3, or 2 with --quick."""
    quick: bool = False
    """A few tasks, two learning rates, two seeds: two mechanisms in under ten minutes on two cores."""
    jobs: int | None = None
    """Runs at once. Default: as many as there are cores."""
    cost: bool = True
    """Measure the speed of every variant, separately from training."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "tuning_seeds", "seeds", "jobs")

    @property
    def judged(self) -> int:
        """How many runs of each variant are judged."""
        return self.seeds or (2 if self.quick else 3)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        try:
            rates = tuple(float(word) for word in self.rates.split(","))
        except ValueError:
            rates = ()
        if not rates or not all(0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
            raise HeadgateError(f"rates={self.rates!r} must be different numbers above 0; write 0.003,0.01")
        return rates[:2] if self.quick and self.rates == SuiteOptions.rates else rates


@dataclass(frozen=True)
class EngineOptions:
    """Where the runs of a study are carried out, which does not change its results."""

    on: Literal["local", "slurm", "ray"] = "local"
    """This machine or a cluster; on a cluster the runs continue when this command ends, and the same command,
    here or elsewhere, picks them up again."""
    processes: int = 1
    """Processes per run, one for each of its GPUs, started by torchrun on every node."""
    nodes: int = 1
    """Nodes per run, on Slurm or Ray."""
    shard: bool = False
    """Split the weights of each run across its processes (FSDP2), for models too large for one GPU."""
    slurm: str = ""
    """Settings for Slurm's jobs by their sbatch names, as in partition=gpu,gpus=1,time=120."""
    ray: str = ""
    """Resources for each run on Ray, on each of its nodes, as in num_gpus=1,num_cpus=8."""
    ray_address: str = "auto"
    """The address of the Ray cluster."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "processes", "nodes")
        engine_settings(self.slurm, "--slurm")
        for name, value in engine_settings(self.ray, "--ray").items():
            if not re.fullmatch(r"\d+(\.\d+)?", value):
                raise HeadgateError(f"--ray {name}={value} is not an amount; write a number of at least 0")
        given = {"slurm": self.slurm, "ray": self.ray}
        given["ray-address"] = "" if self.ray_address == EngineOptions.ray_address else self.ray_address
        for option, text in given.items():
            engine = option.partition("-")[0]
            if text and self.on != engine:
                raise HeadgateError(f"--{option} {text!r} is for --on {engine}, but --on is {self.on}")
        if not self.ray_address.strip():
            raise HeadgateError("--ray-address is empty; give the cluster's address, or auto")
        if self.nodes > 1 and self.on == "local":
            raise HeadgateError(f"--nodes {self.nodes} needs --on slurm or --on ray, but --on is local")
        if self.shard and self.nodes * self.processes == 1:
            raise HeadgateError("--shard splits the weights across processes; give --processes or --nodes")


def engine_settings(text: str, option: str) -> dict[str, str]:
    """`partition=gpu,time=60` by name."""
    assignments, bare = split_assignments(text)
    if bare:
        raise HeadgateError(f"{option} {text!r} has {bare[0]!r} without a value; write NAME=VALUE,...")
    return {name: str(value) for name, value in assignments}
