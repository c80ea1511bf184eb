"""What verifying a checkpoint costs while it is loaded: processor time of one thread and time by the clock,
interleaved, for a file with a digest beside one without.

    python benchmarks/loading.py --layers 20 --rounds 9 [--cold]

fill      into tensors that are there, as a resumed run does: pieces are read and hashed in the cache
load      `headgate.load`, which makes the tensors too
library   safetensors maps the file and copies out of it; verified by hashing the file in a pass of its own
"""

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

import headgate.config
import headgate.recipes
from headgate import files
from headgate.model.decoder import Decoder, header_of
from headgate.model.tensors import TensorFile


def fill(path: Path, targets: dict[str, torch.Tensor]) -> None:
    for _ in TensorFile(path).read(targets):
        pass


def copy(path: Path, targets: dict[str, torch.Tensor], *, verified: bool) -> None:
    if verified:
        with files.open_to_read(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            xxhash.xxh3_128(data).hexdigest()
    with safe_open(path, framework="pt") as file:
        for name, target in targets.items():
            target.copy_(file.get_tensor(name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=20, help="of a model 1,024 wide: 50 MB each")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="read from the disk each time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [f"model.n_layers={given.layers}", "model.d_model=1024", "model.n_heads=8", "model.n_kv_heads=8"]
    model = headgate.config.override(
        headgate.recipes.get_recipe("small"), [*sizes, "model.head_dim=128", "model.d_mlp=2816"]
    ).model
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        decoder = Decoder(model)
        targets = decoder.state_dict()
        sealed, bare = Path(name) / "sealed.safetensors", Path(name) / "bare.safetensors"
        decoder.save(sealed)
        save_file({key: value.clone() for key, value in targets.items()}, bare, header_of(model))
        ways: dict[tuple[str, str], Callable[[], object]] = {
            ("fill", ""): lambda: fill(bare, targets),
            ("fill", "verified"): lambda: fill(sealed, targets),
            ("load", ""): lambda: headgate.load(bare),
            ("load", "verified"): lambda: headgate.load(sealed),
            ("library", ""): lambda: copy(bare, targets, verified=False),
            ("library", "verified"): lambda: copy(sealed, targets, verified=True),
        }
        spent: dict[tuple[str, str], list[tuple[float, float]]] = {way: [] for way in ways}
        for n in range(given.rounds + 1):
            for way, run in ways.items():
                for path in (sealed, bare) if given.cold else ():
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                cpu, clock = time.thread_time(), time.perf_counter()
                run()
                if n:  # the first round brings the files into memory
                    spent[way].append((time.thread_time() - cpu, time.perf_counter() - clock))
        where = "on the disk" if given.cold else "in memory"
        print(f"{sealed.stat().st_size / 1e9:.2f} GB, {given.rounds} rounds, one thread, files {where}")
    for (way, how), each in spent.items():
        cost = ""
        if how:
            pairs = list(zip(each, spent[way, ""], strict=True))
            ratios = [median(a[i] / b[i] for a, b in pairs) for i in (0, 1)]
            cost = f"; verifying adds {ratios[0] - 1:+.1%} and {ratios[1] - 1:+.1%}"
        cpu, clock = (median(one[i] for one in each) for i in (0, 1))
        print(f"{way:8} {how:9} {cpu:.3f} s of processor time, {clock:.3f} s by the clock{cost}")


if __name__ == "__main__":
    main()
