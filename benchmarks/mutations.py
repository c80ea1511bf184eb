"""Deliberate defects, one line each, and the tests that must notice them.

    python benchmarks/mutations.py                  all of them; code 1 if a test lets one pass
    python benchmarks/mutations.py ring resume      those whose name holds one of the words
    python benchmarks/mutations.py --list           what there is

Each defect is put into a temporary copy of the tree, where its tests run until one fails: none may pass, and
without the defect none may fail (the control, which runs first). Kernels are compiled without the processor's
own instructions and little optimised, which is quick and the same code. A line that is no longer in its file
is an error: follow the code, or choose another defect in its place.
"""

import argparse
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
NATIVE = "headgate/ops/native"
LEVEL = "plain"


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    tests: str
    """Arguments of pytest."""

    @property
    def is_native(self) -> bool:
        return self.file.startswith(NATIVE)


SPAN_EDGES = "tests/ops/test_span.py -k 'edges and native'"
SPAN_RANDOM = "tests/ops/test_span.py -k random_shapes"
PAIR_RANDOM = "tests/ops/test_pair_gate.py -k random_shapes"
CONTRACT = "tests/test_mechanisms.py -k"
LOADER = "tests/data/test_loader.py"
LOOP = "tests/train/test_loop.py"
STATISTICS = "tests/compare/test_statistics.py"

MUTATIONS = [
    # the kernels
    Mutation(
        "native window one key short", f"{NATIVE}/span.h",
        "std::max(begin, own - window)", "std::max(begin, own - window + 1)",
        "tests/ops/test_span.py -k window_is_its_width",
    ),
    Mutation(
        "native dense prefix one query long", f"{NATIVE}/span.h",
        "start + own - begin < dense_prefix", "start + own - begin <= dense_prefix", SPAN_EDGES,
    ),
    Mutation(
        "native ring one key short", f"{NATIVE}/span.h",
        "own_key(query) - ring)", "own_key(query) - ring + 1)", SPAN_EDGES,
    ),
    Mutation(
        "native pinned keys counted from the first one held", f"{NATIVE}/span.h",
        "std::clamp<int64_t>(pinned - start, 0, keys)", "std::clamp<int64_t>(pinned, 0, keys)", SPAN_EDGES,
    ),
    Mutation(
        "native scale", f"{NATIVE}/span_forward.cpp",
        "LOG2E / std::sqrt(float(D)), rows)", "LOG2E / std::sqrt(float(D + 1)), rows)", SPAN_EDGES,
    ),
    Mutation(
        "native log-sum-exp without its sum", f"{NATIVE}/span_forward.cpp",
        "(load(top + i) + log2(load(total + i))) * LN2", "load(top + i) * LN2", SPAN_EDGES,
    ),
    Mutation(
        "native running maximum that does not shrink the sum", f"{NATIVE}/span_forward.cpp",
        "load(total + lane + j * LANES) * factor + sum[j]", "load(total + lane + j * LANES) + sum[j]",
        SPAN_EDGES,
    ),
    Mutation(
        "native key gradient of the first head of a group alone", f"{NATIVE}/span_backward.cpp",
        "block(g * call.repeat + r, first);", "if (r == 0) block(g * call.repeat + r, first);", SPAN_EDGES,
    ),
    Mutation(
        "native halo of a strip one key short", f"{NATIVE}/span_backward.cpp",
        "add(s.low, s.own);", "add(s.low + 1, s.own);", SPAN_EDGES,
    ),
    Mutation(
        "native halo without the pinned keys", f"{NATIVE}/span_backward.cpp",
        "add(0, s.first);", "add(0, 0);", SPAN_EDGES,
    ),
    Mutation(
        "native decoding: pieces merged without their maxima", f"{NATIVE}/span_few.cpp",
        "const float factor = exp2(broadcast(state.top - top))[0];", "const float factor = 1.0f;", SPAN_EDGES,
    ),
    Mutation(
        "native decoding: the ring's weight in another unit", f"{NATIVE}/span_few.cpp",
        "call.per_query(b, h, t)] * LOG2E", "call.per_query(b, h, t)]", SPAN_EDGES,
    ),
    Mutation(
        "native decoding: a closed head leaves its output unwritten", f"{NATIVE}/span_few.cpp",
        "std::fill(call.out.row(b, h, t), call.out.row(b, h, t) + D, 0.0f);", ";",
        "tests/ops/test_active.py",
    ),
    Mutation(
        "native pair gate: weights not divided by their sum", f"{NATIVE}/pair_gate.cpp",
        "total[i] = 1 / softmax[1]", "total[i] = softmax[1]", PAIR_RANDOM,
    ),
    Mutation(
        "native pair gate: a worker's key gradient lost", f"{NATIVE}/pair_gate.cpp",
        "gather(span.d_k, b, g, item * shared, shared, weights, D)",
        "gather(span.d_k, b, g, item * shared, shared - 1, weights, D)", PAIR_RANDOM,
    ),
    Mutation(
        "native bias by distance in another unit", f"{NATIVE}/span.h",
        "call.heads(), call.distances, call.keys, LOG2E)", "call.heads(), call.distances, call.keys, 1.0f)",
        f'{CONTRACT} "positional and forward_is_the_reference"',
    ),
    Mutation(
        "native key bias: a strip's gradient lost", f"{NATIVE}/span_backward.cpp",
        "std::copy(row, row + before, halo + (2 * D + r) * before);",
        "std::fill(halo + (2 * D + r) * before, halo + (2 * D + r + 1) * before, 0.0f);",
        f'{CONTRACT} "forgetting and forward_is_the_reference"',
    ),
    Mutation(
        "native top-k: a full list cut too short", f"{NATIVE}/top_k.cpp",
        "== capacity()) keep_best(i, top.counts[first + i], lowest)",
        "== capacity()) keep_best(i, top.counts[first + i] - 1, lowest)", "tests/ops/test_top_k.py",
    ),
    # the other ops
    Mutation(
        "tiles of whole windows one key short", "headgate/ops/span/tiled.py",
        "edges = [(slice(0, size), j < i)", "edges = [(slice(0, size), j <= i)",
        'tests/ops/test_span.py -k "random_shapes or (edges and torch)"',
    ),
    Mutation(
        "pinned keys without a gradient", "headgate/ops/span/tiled.py",
        "total[:, : self.extra].baddbmm_(weights[..., : self.extra].mT, rows)", "pass",
        'tests/ops/test_span.py -k "random_shapes or (edges and torch)"',
    ),
    Mutation(
        "log-sum-exp without a gradient", "headgate/ops/span/tiled.py",
        "        delta -= d_lse\n", "        pass\n", SPAN_RANDOM,
    ),
    Mutation(
        "ties go to the earlier key", "headgate/ops/top_k.py",
        "later = equal.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)",
        "later = equal.cumsum(-1, dtype=torch.int32)", "tests/ops/test_top_k.py",
    ),
    Mutation(
        "selected blocks: gradient without its mean", "headgate/ops/blocks.py",
        "delta = (flat_d * _rows(out)).sum(-1)", "delta = (flat_d * _rows(out)).sum(-1) * 0",
        "tests/ops/test_blocks.py",
    ),
    Mutation(
        "combiner: a block sees its own summary", "headgate/ops/combiner.py",
        ">= of_query[:, None]", "> of_query[:, None]", f'{CONTRACT} "combiner and reference"',
    ),
    Mutation(
        "strided columns that overlap the band", "headgate/ops/strided.py",
        "* stride < i - window", "* stride <= i - window", f'{CONTRACT} "fixed and reference"',
    ),
    Mutation(
        "a gate's gradient of the other sign", "headgate/ops/merge.py",
        "torch.linalg.vecdot(d_out, first - second)", "torch.linalg.vecdot(d_out, second - first)",
        f'{CONTRACT} "context-adaptive and reference"',
    ),
    # mechanisms
    Mutation(
        "dynamic-sparse drops a key too soon", "headgate/mechanisms/dynamic_sparse.py",
        "else max(0, position - o.window)", "else max(0, position - o.window + 1)",
        f'{CONTRACT} "dynamic-sparse and one_by_one"',
    ),
    Mutation(
        "head-gated: the gate inverted", "headgate/mechanisms/head_gated.py",
        "far_weight = 1 - head_weights(gate)", "far_weight = head_weights(gate)",
        f'{CONTRACT} "head-gated and forward_is_the_reference"',
    ),
    Mutation(
        "near-far: near and far heads exchanged", "headgate/mechanisms/near_far.py",
        "[options.window] * near + [options.stretch * options.window] * far",
        "[options.stretch * options.window] * far + [options.window] * near",
        f"{CONTRACT} near_and_far",
    ),
    Mutation(
        "near-far: gates that start half open", "headgate/mechanisms/near_far.py",
        "math.log(self.options.opening / (1 - self.options.opening))", "0.0",
        f"{CONTRACT} initial_values",
    ),
    Mutation(
        "a gate rounded to bf16 before its gradient", "headgate/mechanisms/gates.py",
        "logits.to(wide).sigmoid().to(logits.dtype)", "logits.sigmoid()", f"{CONTRACT} bf16_too",
    ),
    # the cache
    Mutation(
        "cache: pinned keys overwritten", "headgate/model/cache.py",
        "first = buffer[:, :, self._begin : self._begin + keep].clone()",
        "first = buffer[:, :, self._begin + 1 : self._begin + keep + 1].clone()",
        "tests/model/test_cache.py tests/model/test_generate.py -k 'cache or global_tokens'",
    ),
    Mutation(
        "cache: dropped keys moved to the front", "headgate/model/cache.py",
        "= old[:, :, self._begin : self._end]", "= old[:, :, :held]",
        "tests/model/test_cache.py -k move_to_the_front",
    ),
    Mutation(
        "cache: rows of a joined batch numbered from 0", "headgate/model/cache.py",
        "group.rows = [batch + row for row in group.rows]", "group.rows = list(group.rows)",
        "tests/model/test_cache.py tests/model/test_generate.py -k 'row or every_edge or join'",
    ),
    # the loader
    Mutation(
        "loader: a target of the last window counted twice", "headgate/data/loader.py",
        "targets[row, : self._seen_before(int(window))] = IGNORED",
        "targets[row, : self._seen_before(int(window)) - 1] = IGNORED", LOADER,
    ),
    Mutation(
        "loader: ranks that overlap", "headgate/data/loader.py",
        "first = self._samples + self.rank * self.batch_size", "first = self._samples + self.rank", LOADER,
    ),
    Mutation(
        "loader: a loss mask one token off", "headgate/data/loader.py",
        "self._ignore(of_row, start + 1)", "self._ignore(of_row, start)", LOADER,
    ),
    Mutation(
        "loader: every epoch in one order", "headgate/data/loader.py",
        "permute(places, count, self.seed, epoch)", "permute(places, count, self.seed, 0)", LOADER,
    ),
    # checkpoints and resuming
    Mutation(
        "resume without the optimiser", "headgate/train/checkpoint.py",
        "TRAINING: _training_tensors(decoder, optimizer)}", "TRAINING: {}}",
        f"{LOOP} -k resumed_is_the_run",
    ),
    Mutation(
        "resume with the random numbers of the start", "headgate/train/loop.py",
        'f"{seed}/{step}/{rank}"', 'f"{seed}/{rank}"', f"{LOOP} -k random_numbers",
    ),
    Mutation(
        "the best checkpoint is dropped", "headgate/train/checkpoint.py",
        "if step != state.best_step:", "if step:", f"{LOOP} -k the_best_are_kept",
    ),
    Mutation(
        "one checkpoint more is kept", "headgate/train/checkpoint.py",
        "for step in steps[:-keep]:", "for step in steps[: -keep - 1]:", f"{LOOP} -k the_best_are_kept",
    ),
    Mutation(
        "accumulation that forgets a batch", "headgate/train/loop.py",
        "batch in enumerate(batches):", "batch in enumerate(batches[:1]):",
        f"{LOOP} -k accumulation",
    ),
    # documents
    Mutation(
        "native: a document's first key left out", f"{NATIVE}/span.h",
        "std::min(first_keys[b * queries + query], own_key(query) + 1)",
        "std::min(first_keys[b * queries + query] + 1, own_key(query))", "tests/ops/test_documents.py",
    ),
    Mutation(
        "native: every row has the documents of the first", f"{NATIVE}/span.h",
        "first_keys[b * queries + query]", "first_keys[query]", "tests/ops/test_documents.py",
    ),
    Mutation(
        "a key shifted in from another document", "headgate/mechanisms/contract.py",
        "before.masked_fill(first.view", "before.masked_fill(~first.view",
        f"{CONTRACT} 'documents and shifted'",
    ),
    Mutation(
        "a target across a boundary counted", "headgate/data/loader.py",
        "self._beginnings(start + 1, followed)", "self._beginnings(start, followed)", LOADER,
    ),
    # statistics
    Mutation(
        "each of a family's comparisons made at 5%", "headgate/compare/statistics.py",
        "level = alpha / family[1]", "level = alpha", STATISTICS,
    ),
    Mutation(
        "an interval with a degree of freedom too many", "headgate/compare/statistics.py",
        "VariancePart(variance / n, n - 1)", "VariancePart(variance / n, n)", STATISTICS,
    ),
    Mutation(
        "diverged on both sides counts as worse", "headgate/compare/statistics.py",
        "[(not math.isfinite(ours)) - (not math.isfinite(theirs))", "[int(not math.isfinite(ours))",
        STATISTICS,
    ),
]  # fmt: skip


def copy_tree(folder: Path) -> None:
    """What git tracks, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


@cache
def compiler() -> list[str]:
    with patch("setuptools.setup"):
        flags: str = runpy.run_path(str(ROOT / "setup.py"))["FLAGS"]
    return [os.environ.get("CXX", "c++"), *flags.replace("-O3", "-O1").split()]


def compile_kernels(folder: Path) -> None:
    sources = sorted(map(str, (folder / NATIVE).glob("*.cpp")))
    library = folder / NATIVE / f"kernels_{LEVEL}.so"
    library.unlink(missing_ok=True)
    subprocess.run([*compiler(), *sources, "-o", str(library)], check=True)
    (folder / NATIVE / "build.txt").write_text("built for a mutation\n")


def passes(folder: Path, tests: str) -> tuple[bool, str]:
    """Whether the tests pass in this copy, and the last lines they print."""
    environment = os.environ | {"PYTHONPATH": str(folder), "HEADGATE_NATIVE": LEVEL, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *shlex.split(tests),
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {tests}:\n{done.stdout}{done.stderr}")
    return done.returncode == 0, done.stdout[-1500:]


def is_caught(mutation: Mutation, clean: Path, home: Path) -> bool:
    folder = Path(tempfile.mkdtemp(dir=home))
    shutil.copytree(clean, folder, dirs_exist_ok=True)
    path = folder / mutation.file
    path.write_text(path.read_text().replace(mutation.old, mutation.new))
    if mutation.is_native:
        compile_kernels(folder)
    passed, _ = passes(folder, mutation.tests)
    shutil.rmtree(folder)
    print(f"{'MISSED' if passed else 'caught'}  {mutation.name}", flush=True)
    return not passed


def run(chosen: Sequence[Mutation], jobs: int) -> int:
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        home, clean = Path(name), Path(name) / "clean"
        copy_tree(clean)
        compile_kernels(clean)
        wanted = list(dict.fromkeys(mutation.tests for mutation in chosen))
        failed = []
        for tests, (passed, words) in zip(wanted, pool.map(lambda t: passes(clean, t), wanted), strict=True):
            if not passed:
                failed.append(tests)
                print(f"FAILED without a defect: {tests}\n{words}", flush=True)
        caught = list(pool.map(lambda mutation: is_caught(mutation, clean, home), chosen))
    print(f"{sum(caught)} of {len(caught)} defects caught")
    return 0 if all(caught) and not failed else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    chosen = [m for m in MUTATIONS if not given.words or any(word in m.name for word in given.words)]
    for mutation in chosen:
        count = (ROOT / mutation.file).read_text().count(mutation.old)
        if count != 1:
            raise SystemExit(
                f"{mutation.name}: {mutation.old!r} stands {count} times in {mutation.file}, not once"
            )
        if given.list:
            print(f"{mutation.name}: {mutation.file}: {mutation.old.strip()} -> {mutation.new.strip()}")
    return 0 if given.list else run(chosen, given.jobs)


if __name__ == "__main__":
    raise SystemExit(main())
