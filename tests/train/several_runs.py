"""Started by torchrun: several runs one after another, since starting the processes takes longest.

torchrun ... several_runs.py CONFIG DATA RUN[:shard] RUN[:shard] ...
"""

import sys

import torch

from headgate import config
from headgate.config import Config, RunOptions
from headgate.train.loop import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    given, data, *runs = sys.argv[1:]
    for run in runs:
        out, _, how = run.partition(":")
        options = RunOptions(save_every=7, keep=9, shard=how == "shard")
        train(config.load(Config, given), data, out, options)
