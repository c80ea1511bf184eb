"""Started by torchrun: several runs one after another, since starting the processes takes longest.

torchrun ... several_runs.py CONFIG DATA RUN[:shard][:bf16][:muon] RUN ...

Beside each run stands RUN.collectives.json: how many collectives it made, by kind and type, such as
{"reduce_scatter float32": 20}.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headgate import config
from headgate.config import Config
from headgate.options import RunOptions
from headgate.train.loop import train


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in ("reduce_scatter", "allgather", "allreduce"):
            if func.namespace == "c10d" and kind in func.name():
                dtype = next(t.dtype for t in tree_leaves(args) if isinstance(t, torch.Tensor))
                self.counts[f"{kind} {dtype}".replace("torch.", "")] += 1
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    given, data, *runs = sys.argv[1:]
    for run in runs:
        out, *how = run.split(":")
        asked = config.load(Config, given)
        if "bf16" in how:
            asked = replace(asked, train=replace(asked.train, precision="bf16"))
        if "muon" in how:
            asked = replace(asked, train=replace(asked.train, optimizer="muon"))
        with Collectives() as seen:
            train(asked, data, out, RunOptions(save_every=5, keep=9, shard="shard" in how))
        Path(f"{out}.collectives.json").write_text(json.dumps(seen.counts))
