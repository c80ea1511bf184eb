"""Every op test runs with uninitialised memory full of NaN, torch's and the kernels', so that none of it is
read."""

from collections.abc import Iterator

import pytest
import torch

from headgate.ops.native import library


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    if library.unavailable() is None:
        library.library().headgate_set_poison(1)
    yield
    torch.use_deterministic_algorithms(False)
    if library.unavailable() is None:
        library.library().headgate_set_poison(0)


@pytest.fixture(params=["native", "torch", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each path of an op in turn."""
    return available(request.param)


@pytest.fixture(params=["native", "torch"])
def fast_backend(request: pytest.FixtureRequest) -> str:
    return available(request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def available(backend: str) -> str:
    reason = library.unavailable() if backend == "native" else None
    if reason is not None:
        pytest.skip(f"the native path was not tested: {reason}")
    return backend
