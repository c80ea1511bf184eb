"""Started by torchrun: a run whose second process kills itself, the first time that it is started.

torchrun ... dying_run.py CONFIG DATA RUN FORWARDS MARK

It dies in its forward pass number FORWARDS and leaves the file MARK, beside which it lives on.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from headgate import config
from headgate.config import Config
from headgate.model.decoder import Decoder
from headgate.options import RunOptions
from headgate.train.loop import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    given, data, out, forwards, mark = sys.argv[1:]
    forward, left = Decoder.forward, int(forwards)

    def dying(self: Decoder, *arguments: Any, **options: Any) -> Any:
        global left
        left -= torch.is_grad_enabled()
        if left == 0:
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, *arguments, **options)

    if os.environ["RANK"] == "1" and not Path(mark).exists():
        Decoder.forward = dying  # type: ignore[method-assign]
    train(config.load(Config, given), data, out, RunOptions(save_every=20))
