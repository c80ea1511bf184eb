"""One process or many: what the loop needs to know about the others, and the model spread across them.

A job is started with torchrun, which tells each process its place. Every rank takes its share of each global
batch, so neither the batch nor the order of the data depends on the number of processes.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from headgate.errors import HeadgateError
from headgate.model.decoder import Decoder

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)
_joined = itertools.count()


@dataclass(frozen=True)
class World:
    """This process's place in the job."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, batch_size: int) -> int:
        """How many sequences of a global batch this rank takes."""
        if batch_size % self.size:
            raise HeadgateError(
                f"batch_size={batch_size} cannot be shared evenly among {self.size} processes; "
                "choose a multiple of their number, with more accumulation if that takes too much memory"
            )
        return batch_size // self.size

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, in double precision; also a point where the ranks wait for one another."""
        if self.size == 1:
            return list(values)
        return self.sum_tensor(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_tensor(self, values: Tensor) -> Tensor:
        """The sums over all ranks, on the CPU."""
        if self.size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values.cpu()

    def on_first(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0, for all ranks; if it fails there, every rank raises."""
        if self.size == 1:
            return act()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = act()
            except HeadgateError as error:
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0, device=self.device)
        if outcome[1] is not None:
            raise HeadgateError(outcome[1])
        result: T = outcome[0]
        return result

    def wrap(self, decoder: Decoder, *, shard: bool, precision: str = "fp32") -> nn.Module:
        """The module whose forward and backward passes keep the ranks together.

        Sharded weights are gathered in the precision they are multiplied in; gradients are summed in fp32.
        Activations between layers keep their precision: the RoPE tables would not survive rounding.
        """
        if shard:
            if not dist.is_initialized():
                raise HeadgateError(
                    "--shard spreads the weights across processes, but there is only one; start it with "
                    "torchrun, or drop the option"
                )
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            mesh = init_device_mesh(self.device.type, (self.size,))
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if precision == "bf16" else None,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
            for layer in decoder.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(decoder, mesh=mesh, mp_policy=policy)
            return decoder
        if self.size == 1:
            return decoder
        return nn.parallel.DistributedDataParallel(decoder, gradient_as_bucket_view=True)


@contextmanager
def join(device: str | None) -> Iterator[World]:
    """Join the job that torchrun started, if it did; leave it at the end."""
    chosen = _device(device)
    if "RANK" not in os.environ:
        yield World(0, 1, chosen)
        return
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "")
        if not value if name == "MASTER_ADDR" else not value.isdecimal() or len(value) > 9:
            raise HeadgateError(
                f"RANK={os.environ['RANK']} is set, as torchrun sets it, but {name} is {value!r}; start the "
                "job with torchrun, or unset RANK"
            )
    place, places = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if int(place) >= int(places):
        raise HeadgateError(
            f"RANK={place} is not below WORLD_SIZE={places}; start the job with torchrun, or unset RANK"
        )
    if chosen.type == "mps" and int(places) > 1:
        raise HeadgateError(
            f"device='mps' is a single GPU, and WORLD_SIZE={places} processes were started; start one"
        )
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # torchrun keeps one store across its restarts, where dead processes' addresses would still be found; and
    # a process may join more than once, for one run after another.
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_joined)}"
    store = PrefixStore(f"headgate {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield World(rank, size, chosen)
        dist.barrier()  # a rank that leaves early takes its connections from under the others
    finally:
        dist.destroy_process_group()


def hold_gradients(model: nn.Module, *, hold: bool) -> AbstractContextManager[None]:
    """While gradients accumulate, exchange them only once, in the last forward and backward pass."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        context: AbstractContextManager[None] = model.no_sync() if hold else nullcontext()
        return context
    if dist.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(not hold)
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, gathered from all ranks if it is sharded; every rank must call it."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().contiguous()


def fill(target: Tensor, values: Tensor | None, world: World) -> None:
    """Copy rank 0's `values` (None on the others) into `target`, sharded or not."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if values is None:
        values = torch.empty(target.shape, dtype=target.dtype)
    values = values.to(device=world.device, dtype=target.dtype)
    with torch.no_grad():
        if isinstance(target, DTensor):
            target.copy_(distribute_tensor(values, target.device_mesh, target.placements))
        else:
            if world.size > 1:
                dist.broadcast(values, src=0)
            target.copy_(values)


def _device(name: str | None) -> torch.device:
    index = os.environ.get("LOCAL_RANK", "0")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(f"cuda:{index}" if name == "cuda" else name)
    except RuntimeError as error:
        raise HeadgateError(f"device={name!r} is not a device; expected one such as cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HeadgateError(f"device={name!r} is not available: PyTorch finds no GPU here; use cpu")
    try:
        torch.empty(1, device=device).item()
    except Exception as error:  # each backend fails with an exception of its own
        raise HeadgateError(f"device={name!r} is not available here; use cpu") from error
    return device
