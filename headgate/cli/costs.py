"""Commands about cost: bench measures here and now, plan predicts."""

from pathlib import Path

from headgate.cli.arguments import refuse_given
from headgate.errors import HeadgateError
from headgate.options import parse_lengths


def bench(
    *,
    lengths: str = "512,1024,2048,4096",
    mechanisms: tuple[str, ...] | None = None,
    steps: bool = False,
    decoded_after: str = "2048,65536",
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    window: int = 256,
    peers: bool = True,
    memory: bool = True,
    seconds: float = 6.0,
    threads: int | None = None,
    json: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Measure the time and memory of attention ops and mechanisms against causal SDPA and other packages.

    Args:
        lengths: Sequence lengths to measure at, separated by commas.
        mechanisms: Mechanisms or ops to measure, such as local full window_attention; a pattern over the
            layers counts as the sum of its parts. Default: all of them.
        steps: Measure mechanisms in whole training steps and in decoding, with recipe tiny, against full.
        decoded_after: With --steps, the context lengths after which tokens are decoded, separated by commas.
        batch: Sequences per batch.
        heads: Query heads.
        kv_heads: Key and value heads. Default: as many as query heads.
        head_dim: Width of a head.
        window: Window of every op and mechanism that has one.
        peers: Also measure other packages that are installed.
        memory: Also measure peak memory, each case in a fresh process.
        seconds: Roughly how long to measure each case at each length, within 3 to 30 rounds.
        threads: Threads to use. Default: PyTorch's choice.
        json: Write all figures to this file.
        figure: Plot time against length in this .html, .png or .svg file.
    """
    of_ops = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": window}
    if steps:
        refuse_given(bench, "bench --steps", of_ops | {"peers": peers, "figure": figure})
    else:
        refuse_given(bench, "bench without --steps", {"decoded_after": decoded_after})
    import torch

    from headgate.measure import bench as measure
    from headgate.measure.speed import Shape

    if threads is not None:
        if threads < 1:
            raise HeadgateError(f"threads={threads} is too small; it must be at least 1")
        torch.set_num_threads(threads)
    if steps:
        measure.bench_steps(
            mechanisms,
            lengths=parse_lengths(lengths),
            decoded_after=parse_lengths(decoded_after, "decoded_after"),
            memory=memory,
            seconds=seconds,
            json_path=json,
        )
        return
    measure.bench(
        Shape(batch, heads, heads if kv_heads is None else kv_heads, head_dim, window),
        lengths=parse_lengths(lengths),
        names=mechanisms,
        peers=peers,
        memory=memory,
        seconds=seconds,
        json_path=json,
        figure_path=figure,
    )


def plan(
    recipe: str,
    /,
    *,
    mechanism: str | None = None,
    context: int | None = None,
    batch: int | None = None,
    device: str = "cpu",
    count: int = 1,
    price: float | None = None,
    table: bool = False,
    mechanisms: tuple[str, ...] = (),
    contexts: str = "",
    threads: int | None = None,
    data: str | None = None,
    json: bool = False,
    override: tuple[str, ...] = (),
) -> None:
    """Predict what a training run will take: work, memory by part, what fits on a device, time and cost.

    Args:
        recipe: A recipe such as paper-134m, or a config.json.
        mechanism: The mechanism of the layers, such as dynamic-sparse or local+full. Default: the recipe's.
        context: Tokens in a sequence; the number of steps is adjusted so that the run sees as many tokens.
            Default: the recipe's.
        batch: Sequences in a pass over all devices. Default: the recipe's.
        device: A100, 'A100 40GB', H100, H200, B200, MI300X, L40S, L4, 'RTX 4090', 'RTX 5090', M4, 'M4 Max',
            'M3 Ultra', or cpu for this machine, which is measured on the spot.
        count: Number of devices.
        price: Price of one device per hour, in your currency.
        table: Compare several mechanisms at several context lengths.
        mechanisms: The mechanisms in the table. Default: full attention and the four papers'.
        contexts: The context lengths in the table, as in 2048,8192. Default: 1, 4 and 16 times the recipe's.
        threads: CPU threads. Default: PyTorch's choice.
        data: A folder written by `headgate prepare`; where documents are masked, attention's work is computed
            from their lengths. Default: as if each sequence were one document.
        json: Print JSON instead of tables.
        override: Change a setting of the recipe, as in train.steps=100; can also be given as a bare word.
    """
    from headgate.plan.tables import plan_words

    plan_words(
        recipe,
        override,
        mechanism=mechanism,
        context=context,
        batch=batch,
        device=device,
        count=count,
        price=price,
        table=table,
        mechanisms=mechanisms,
        contexts=parse_lengths(contexts, "contexts"),
        threads=threads,
        data=data,
        as_json=json,
    )
