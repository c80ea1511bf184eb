"""How far `headgate plan` is from the truth on this machine: predicted against measured peak memory and time.

    python benchmarks/plan_errors.py
    python benchmarks/plan_errors.py --no-time              # memory alone, which no other load disturbs

Memory is measured in a fresh process for each case. Time is measured in rounds: in each, the planner times
its pieces and makes its prediction, then steps of the whole model run; a case's figures are the medians over
the rounds. Let nothing else run meanwhile.
"""

import argparse
from dataclasses import dataclass, replace
from statistics import median

import torch

from headgate.compare.variants import Variant
from headgate.config import Config, override
from headgate.machine import keep_memory
from headgate.measure import costs
from headgate.plan.devices import find_device, timed
from headgate.plan.planner import Planner
from headgate.recipes import get_recipe

GOAL = {"memory": 0.10, "time": 0.30}


@dataclass(frozen=True)
class Case:
    recipe: str
    mechanism: str
    length: int
    settings: tuple[str, ...] = ()

    @property
    def variant(self) -> Variant:
        return Variant.parse(self.mechanism)

    def config(self) -> Config:
        """As `costs` runs it: as many tokens a step as in the recipe."""
        base = override(get_recipe(self.recipe), self.settings)
        sequences = costs.sequences_at(self.length, base.train)
        return replace(
            base,
            model=replace(base.model, mechanism=self.variant.mechanism),
            train=replace(base.train, context=self.length, batch_size=sequences),
        )

    def __str__(self) -> str:
        return " ".join([self.recipe, self.mechanism, f"T={self.length}", *self.settings])


WIDE = ("model.d_model=512", "model.d_mlp=1536", "train.batch_size=1")
CASES = [
    Case("tiny", "full", 256),
    Case("tiny", "full", 1024, ("train.batch_size=16",)),
    Case("tiny", "local", 4096, ("train.batch_size=16",)),
    Case("tiny", "sparse-geometric", 512),
    Case("tiny", "context-adaptive", 512),
    Case("tiny", "head-gated", 2048),
    Case("small", "full", 1024, ("train.batch_size=2",)),
    Case("small", "full", 4096),
    Case("small", "dynamic-sparse", 4096),
    Case("small", "head-gated", 1024, ("train.batch_size=2",)),
    Case("small", "context-adaptive:select=block", 2048, ("train.batch_size=2",)),
    Case("small", "sparse-geometric:gate=log", 1024, ("train.batch_size=1",)),
    Case("small", "combiner", 2048, ("train.batch_size=2",)),
    Case("small", "positional", 1024, ("train.batch_size=2",)),
    Case("small", "full", 512, WIDE),
    Case("small", "dynamic-sparse", 1024, (*WIDE, "model.vocab_size=16384")),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", default="", help="cases whose line has this in it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    print(f"{options.threads} thread(s); predicted, measured, error")
    errors: dict[str, list[float]] = {"memory": [], "time": []}
    for case in CASES:
        if options.only not in str(case):
            continue
        line = f"{case!s:82}"
        if options.memory:
            said, true = memory(case)
            errors["memory"].append(said / true - 1)
            line += f"{said / 1e6:9.1f} {true / 1e6:9.1f} MB {errors['memory'][-1]:+7.1%}   "
        if options.time:
            said, true = seconds(case, options.rounds)
            errors["time"].append(said / true - 1)
            line += f"{1000 * said:9.1f} {1000 * true:9.1f} ms {errors['time'][-1]:+7.1%}"
        print(line, flush=True)
    for kind, found in errors.items():
        if found:
            worst = max(map(abs, found))
            within = sum(abs(error) <= GOAL[kind] for error in found)
            print(f"{kind}: worst {worst:.1%}; {within} of {len(found)} within {GOAL[kind]:.0%}")


def memory(case: Case) -> tuple[float, float]:
    asked = case.config()
    planner = Planner(asked, find_device("cpu"), 1)
    said = planner.memory(asked.train.batch_size, recompute=False, shard=False).total
    return said, costs.peak_memory(asked, case.length)


def seconds(case: Case, rounds: int) -> tuple[float, float]:
    asked, device = case.config(), find_device("cpu")
    step = costs.training_step(costs.build(asked), asked.train, case.length)
    said, true = [], []
    for _ in range(rounds):
        way = Planner(asked, device, 1).seconds(asked.train.batch_size, recompute=False, shard=False)
        said.append(way.expected)
        true.append(median(timed(step, seconds=0.3, least=2)))
    return median(said), median(true)


if __name__ == "__main__":
    main()
