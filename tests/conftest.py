"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
import torch

# Triton reads it when it is first imported: its kernels then run on the CPU, one operation at a time.
# On a device (`make test-gpu`) they are compiled.
if os.environ.get("HEADGATE_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are fastest on one thread; a test about threads sets its own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that an op allocates and forgets to write holds NaN, so that no test passes by luck."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
