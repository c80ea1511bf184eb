"""How fast and how large `prepare` is, beside the bare tokenizers library, and how fast the loader is.

    python benchmarks/data_throughput.py [--shared ../shared] [--rounds 5] [--only throughput memory loader]

Throughput is measured in turns, one of the library's `encode_batch` on texts already in memory and one of the
whole of `prepare` (which also loads the tokenizer, reads the file and writes the shards), as a ratio each.
Memory is the largest sum, over `prepare` and its workers, of each process's proportional set size.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

WORKERS = 2


def throughput(shared: Path, rounds: int) -> None:
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    from headgate.data.prepare import Request, prepare

    source, tokenizer = shared / "data/webmix.parquet", shared / "data/tokenizers/qwen3/tokenizer.json"
    texts = pq.read_table(source, columns=["text"])["text"].to_pylist()
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"prepare of {source.name} with Qwen3, {WORKERS} workers, beside encode_batch ({megabytes:.1f} MB)")
    ratios, cpu_ratios = [], []
    for number in range(rounds):
        # A new one each time: it remembers the words it has met, and `prepare` begins without that too.
        library = Tokenizer.from_file(str(tokenizer))
        begun, cpu_begun = time.perf_counter(), cpu_seconds()
        library.encode_batch(texts, add_special_tokens=False)
        bare, bare_cpu = time.perf_counter() - begun, cpu_seconds() - cpu_begun
        with tempfile.TemporaryDirectory() as folder:
            begun, cpu_begun = time.perf_counter(), cpu_seconds()
            prepare(Request(str(source), str(tokenizer)), Path(folder) / "out", workers=WORKERS)
            ours, ours_cpu = time.perf_counter() - begun, cpu_seconds() - cpu_begun
        ratios.append(bare / ours)
        cpu_ratios.append(bare_cpu / ours_cpu)
        print(
            f"  {number + 1}: encode_batch {megabytes / bare:.2f} MB/s, prepare {megabytes / ours:.2f} MB/s, "
            f"ratio {ratios[-1]:.2f}; seconds of processor {bare_cpu:.1f} and {ours_cpu:.1f}",
            flush=True,
        )
    print(f"  ratio of throughput (goal 0.8): {spread(ratios)}")
    print(f"  ratio of work per second of processor, which other programs disturb less: {spread(cpu_ratios)}")


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}"


def cpu_seconds() -> float:
    """Of this process, and of its workers that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def memory(shared: Path) -> None:
    import pyarrow.parquet as pq

    data = shared / "data"
    print(f"peak memory of prepare with Qwen3 and {WORKERS} workers (goal: under 1000 MB, and flat)")
    with tempfile.TemporaryDirectory() as folder:
        novels = data / "gutenberg_novels.parquet"
        large = Path(folder) / "gutenberg_novels_10_times.parquet"
        table = pq.read_table(novels, columns=["text"])
        with pq.ParquetWriter(large, table.schema, compression="zstd") as writer:
            for _ in range(10):
                writer.write_table(table)
        del table
        for number, source in enumerate((data / "webmix.parquet", novels, large)):
            command = [sys.executable, "-c", "from headgate.cli import main; main()"]
            command += ["prepare", str(source), f"{folder}/{number}", "--workers", str(WORKERS)]
            command += ["--tokenizer", str(data / "tokenizers/qwen3")]
            begun = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            peak = 0
            while process.poll() is None:
                peak = max(peak, sum(map(proportional_kilobytes, family(process.pid))))
                time.sleep(0.05)
            assert process.returncode == 0
            seconds = time.perf_counter() - begun
            print(f"  {source.name}: {peak / 1e3:.0f} MB in {seconds:.0f} s", flush=True)


def family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def proportional_kilobytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has just ended
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def loader(shared: Path, rounds: int) -> None:
    import torch

    from headgate.data.loader import Loader
    from headgate.data.prepare import Request, prepare
    from headgate.data.shards import open_split

    torch.set_num_threads(1)
    print("loader, one core, from the page cache (goal 20M tokens/s)")
    with tempfile.TemporaryDirectory() as folder:
        request = Request(str(shared / "data/gutenberg_novels.parquet"), "byte", splits=(1, 0, 0))
        prepare(request, Path(folder) / "out", workers=WORKERS)
        split = open_split(Path(folder) / "out", "train")  # its checksum brings it into the page cache
        for length, batch_size in ((256, 16), (512, 16), (1024, 8), (2048, 8)):
            speeds = []
            for _ in range(rounds):
                batches = Loader(split, length=length, batch_size=batch_size)
                begun, tokens = time.perf_counter(), 0
                while tokens < 10_000_000:
                    tokens += next(batches)[0].numel()
                speeds.append(tokens / (time.perf_counter() - begun) / 1e6)
            print(f"  batches of {batch_size} x {length}, million tokens/s: {spread(speeds)}")


def main() -> None:
    default = os.environ.get("HEADGATE_SHARED", Path(__file__).parents[2] / "shared")
    parser = argparse.ArgumentParser(description="Throughput and memory of the data stage.")
    parser.add_argument("--shared", type=Path, default=default, help="the folder with the real files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["throughput", "memory", "loader"])
    arguments = parser.parse_args()
    if "throughput" in arguments.only:
        throughput(arguments.shared, arguments.rounds)
    if "loader" in arguments.only:
        loader(arguments.shared, arguments.rounds)
    if "memory" in arguments.only:
        memory(arguments.shared)


if __name__ == "__main__":
    main()
