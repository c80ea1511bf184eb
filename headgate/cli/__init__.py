"""The command line: thin subcommands; whatever is heavy is imported inside them."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from headgate.config import RunOptions, StudyOptions
from headgate.errors import HeadgateError, suggestion
from headgate.version import __version__


def mechanisms(name: str | None = None, /) -> None:
    """List the attention mechanisms, or show one with its formula, options and ablations.

    Args:
        name: The mechanism to show; all of them in a table when absent.
    """
    from headgate.cli.catalogue import print_all, print_one

    if name is None:
        print_all()
    else:
        print_one(name)


def prepare(
    source: str | None = None,
    out: str | None = None,
    /,
    *,
    tokenizer: str = "bpe:4096",
    text_column: str = "text",
    splits: str = "80/10/10",
    dedup: bool = False,
    max_tokens: int | None = None,
    end_of_text: str | None = None,
    workers: int | None = None,
    check: str | None = None,
) -> None:
    """Turn text into token shards, or verify the shards of a folder with --check.

    Args:
        source: 'stdlib', a file, a folder, a glob, an address such as hf://datasets/HuggingFaceFW/fineweb, or
            'recall', which makes associative recall (recall:context=1024,pairs=32 sets its sizes).
        out: The folder to write; an interrupted prepare goes on when it is run again.
        tokenizer: 'byte', 'bpe:N', a tokenizer.json, a folder with one, or a name on the hub.
        text_column: The column or key that holds the text in parquet and JSON.
        splits: Shares of train, val and test.
        dedup: Drop the repeats of a text.
        max_tokens: Stop with the document that reaches this many tokens; all of the source when absent.
        end_of_text: The token that closes each document; the tokenizer's own when absent.
        workers: Threads that tokenise; as many as there are cores when absent.
        check: Verify every checksum and index of this folder, and write nothing.
    """
    from headgate.data import prepare as data
    from headgate.data.progress import print_checked, print_summary
    from headgate.data.recall import parse as parse_recall
    from headgate.data.recall import prepare_recall
    from headgate.data.shards import check as verify
    from headgate.data.splits import parse_shares

    for_text = {"tokenizer": tokenizer, "text_column": text_column, "dedup": dedup, "max_tokens": max_tokens}
    for_text |= {"end_of_text": end_of_text, "workers": workers}
    if check is not None:
        if source is not None:
            raise HeadgateError(f"--check {check} takes no source, but {source!r} was given; leave it out")
        _refuse_given(f"--check {check}", for_text | {"splits": splits})
        print_checked(verify(check), check)
    elif source is None or out is None:
        raise HeadgateError("prepare needs a source and a folder to write: headgate prepare SOURCE OUT")
    else:
        shares, recall = parse_shares(splits), parse_recall(source)
        if recall is not None:
            _refuse_given(f"source {source!r}", for_text)
            print_summary(prepare_recall(recall, source, shares, Path(out)), out)
            return
        request = data.Request(source, tokenizer, text_column, shares, dedup, max_tokens, end_of_text)
        print_summary(data.prepare(request, out, workers=workers), out)


def _refuse_given(what: str, options: dict[str, Any]) -> None:
    """Raise if one of these options of prepare is given where it can have no effect."""
    parameters = inspect.signature(prepare).parameters
    for name, value in options.items():
        if value != parameters[name].default:
            flag = f"--{name.replace('_', '-')}"
            raise HeadgateError(f"{what} does not take {flag}, but {value!r} was given; leave it out")


def train(
    recipe: str | None = None,
    /,
    *,
    out: str,
    data: str | None = None,
    mechanism: str | None = None,
    init: str | None = None,
    override: tuple[str, ...] = (),
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
) -> None:
    """Train a recipe with a mechanism on prepared shards; the same command goes on where a run was stopped.

    Args:
        recipe: A recipe such as 'tiny', or a config.json; that of the run when absent, to go on with it.
        out: The run folder.
        data: A folder that `headgate prepare` wrote; that of the run when absent.
        mechanism: The attention of all layers, such as 'dynamic-sparse:window=64,gate=open'.
        init: Begin with the weights of this folder, such as `headgate convert` writes; its model is trained.
        override: A setting that differs, such as train.steps=100; the word alone says it too.
    """
    from headgate.train.start import start

    stopped_by = start(recipe, override, out=out, data=data, mechanism=mechanism, init=init, options=options)
    if stopped_by:
        sys.exit(128 + stopped_by)


def evaluate(
    run: str,
    /,
    *,
    split: str = "val",
    tokens: int | None = None,
    checkpoint: str = "last",
    data: str | None = None,
    context: int | None = None,
    device: str | None = None,
    skip_below: tuple[float, ...] = (),
    json: bool = False,
) -> None:
    """Evaluate a run on the tokens of a split: loss, perplexity, bits per byte, loss by position, gates.

    Args:
        run: The run folder, or with --data and --context any folder or file that holds a model.
        split: val, test or train.
        tokens: Only so many from the beginning; all of them when absent.
        checkpoint: last, best, or a step.
        data: Where the run's data is now; where it was trained on when absent.
        context: Tokens of a sequence; as many as in training when absent.
        device: Such as cpu or cuda; the GPU when there is one.
        skip_below: Thresholds for gates: what each skips in decoding, the time it saves, the loss it costs.
        json: Print one JSON object instead of tables.
    """
    from headgate.train.evaluate import evaluate_run
    from headgate.train.progress import print_evaluation

    skipped = []
    chosen: dict[str, Any] = {"split": split, "tokens": tokens, "which": checkpoint}
    chosen |= {"data": data, "context": context, "device": device}
    if skip_below:
        from headgate.measure.skipping import gate_skipping, print_skipping

        skipped = gate_skipping(run, skip_below, **chosen)
    result = evaluate_run(run, **chosen)
    if skipped:
        result["skipping"] = [threshold.to_dict() for threshold in skipped]
    print_evaluation(result, as_json=json)
    if skipped and not json:
        print_skipping(skipped)


def generate(
    run: str,
    /,
    *,
    prompt: str,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    skip_below: float | None = None,
    checkpoint: str = "last",
    tokenizer: str | None = None,
    end_of_text: str | None = None,
    device: str | None = None,
) -> None:
    """Continue a prompt with a trained model; the text comes out as it is written.

    Args:
        run: A run folder, a checkpoint folder or a model file.
        prompt: The text to continue; - reads standard input.
        max_new_tokens: Stop after so many, if the text has not ended before.
        temperature: Below 1 likely tokens are preferred; 0 always takes the likeliest.
        top_k: Draw from so many of the likeliest tokens alone.
        top_p: Draw from the likeliest tokens that have this probability together.
        min_p: Draw from the tokens at least this times as likely as the likeliest.
        repetition_penalty: Above 1, tokens that occurred become less likely.
        seed: Of the random numbers; the same seed gives the same text.
        skip_below: Do not compute what gates below this let through.
        checkpoint: last, best, or a step, of a run folder.
        tokenizer: A tokenizer.json or a folder with one; the run's own when absent.
        end_of_text: The token that ends a text; the tokenizer's own when absent.
        device: Such as cpu or cuda; the GPU when there is one.
    """
    from headgate.cli.prompt import open_model, read_prompt, write
    from headgate.train.distributed import join

    with join(device) as world:
        decoder, words = open_model(run, which=checkpoint, tokenizer=tokenizer, end_of_text=end_of_text)
        told = write(
            decoder.to(world.device),
            words,
            read_prompt(prompt),
            max_new_tokens,
            say=lambda text: print(text, end="", flush=True),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            skip_below=skip_below,
        )
    print()
    print(told, file=sys.stderr)


def convert(
    source: str,
    out: str,
    /,
    *,
    to: Literal["headgate", "qwen"] = "headgate",
    mechanism: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
) -> None:
    """Turn a Hugging Face Qwen2, Qwen2.5 or Qwen3 into headgate's form, or back; change its attention.

    Args:
        source: A Hugging Face folder, a run folder, a checkpoint, or a .safetensors file of headgate.
        out: The folder to write; it must not exist, or be empty.
        to: headgate (transformers reads it too, with headgate.model.hf imported), or plain qwen.
        mechanism: The attention of all layers from now on, such as 'dynamic-sparse:window=512', or a pattern
            over them, '["local", "full"]'; it starts as full attention where it can.
        dtype: Of the weights; as in the source when absent.
    """
    from headgate.model.convert import convert

    done = convert(source, out, to=to, mechanism=mechanism, dtype=dtype)
    print(f"{done.source} -> {done.form}: {done.parameters:,} parameters in {done.dtype}, in {out!r}")
    for change in done.changes:
        print(change)


def bench(
    *,
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096),
    mechanisms: tuple[str, ...] | None = None,
    steps: bool = False,
    decoded_after: tuple[int, ...] = (2048, 65536),
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
    """Measure what every attention op and mechanism costs here, against causal SDPA and other packages.

    Args:
        lengths: Sequence lengths to measure at.
        mechanisms: Mechanisms (name:option=value allowed) or ops to measure; all of both when absent.
        steps: Measure mechanisms in whole training steps and in decoding, recipe study, against full.
        decoded_after: With --steps: the contexts after which tokens are decoded.
        batch: Sequences at once.
        heads: Query heads.
        kv_heads: Key and value heads; as many as query heads when absent.
        head_dim: Width of a head.
        window: Window of everything that has one.
        peers: Measure other packages beside ours, where they are installed.
        memory: Measure peak memory too, each case in a fresh process.
        seconds: About how long a case is measured at a length, within 3 to 30 rounds.
        threads: Threads to use; as PyTorch chooses when absent.
        json: Write all figures to this file.
        figure: Draw time against length into this .html, .png or .svg file.
    """
    import torch

    from headgate.measure.bench import bench, bench_steps
    from headgate.measure.speed import Shape

    if threads is not None:
        if threads < 1:
            raise HeadgateError(f"threads={threads} is too small; it must be at least 1")
        torch.set_num_threads(threads)
    if steps:
        bench_steps(
            mechanisms,
            lengths=lengths,
            decoded_after=decoded_after,
            memory=memory,
            seconds=seconds,
            json_path=json,
        )
        return
    bench(
        Shape(batch, heads, heads if kv_heads is None else kv_heads, head_dim, window),
        lengths=lengths,
        names=mechanisms,
        peers=peers,
        memory=memory,
        seconds=seconds,
        json_path=json,
        figure_path=figure,
    )


def compare(
    names: tuple[str, ...] = (),
    /,
    *,
    data: str,
    out: str,
    override: tuple[str, ...] = (),
    options: StudyOptions = StudyOptions(),  # noqa: B008 - frozen
) -> None:
    """Train variants under equal conditions over several seeds, measure their cost, write a page about it.

    Args:
        names: Mechanisms, such as dynamic-sparse, sparse-geometric:gate=log, dynamic-sparse:no-gate (an
            ablation), local+full (a pattern over the layers), each with a label of its own after an @ if
            wanted; the four papers' when absent. The baseline, full attention, is always there.
        data: A folder that `headgate prepare` wrote.
        out: The study folder; run again, a study goes on, and with more names or seeds it grows.
        override: A setting of the recipe that differs, such as train.steps=100; the word alone says it too.
    """
    from headgate.compare.study import run_study

    _write_report(out, whole=run_study(names, data, out, override, options))


def ablate(
    name: str,
    /,
    *,
    data: str,
    out: str,
    override: tuple[str, ...] = (),
    options: StudyOptions = StudyOptions(),  # noqa: B008 - frozen
) -> None:
    """Compare a mechanism, each of its ablations and the baseline, as `headgate compare` does.

    Args:
        name: The mechanism.
        data: A folder that `headgate prepare` wrote.
        out: The study folder; run again, a study goes on.
        override: A setting of the recipe that differs, such as train.steps=100; the word alone says it too.
    """
    from headgate.compare.study import run_study
    from headgate.compare.variants import with_ablations

    _write_report(out, whole=run_study(with_ablations(name), data, out, override, options))


def report(folder: str, /, *, against: str | None = None, publish: str | None = None) -> None:
    """Write a study's results.json, results.md and report.html again, from what its folder holds.

    Args:
        folder: The study folder.
        against: The label of a variant; every other is compared with it too, in a table that is printed.
        publish: A folder for files small enough to commit: the results without each run's course, and the
            page's figures as SVG.
    """
    _write_report(folder, against=against)
    if publish is not None:
        from headgate.report import publish as publishing

        written = publishing.publish(folder, publish)
        print(f"{len(written)} files are in {publish}")


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
    contexts: str = "",
    threads: int | None = None,
    json: bool = False,
    override: tuple[str, ...] = (),
) -> None:
    """Tell what a training run will take: work, memory by part, what fits a device, time and cost.

    Args:
        recipe: A recipe such as paper-134m, or a config.json.
        mechanism: As `headgate compare` takes one; the recipe's own when absent. With --table several, as in
            'full dynamic-sparse'; full attention and the four papers' when absent.
        context: Tokens of a sequence; the recipe's when absent. The steps are fitted to its tokens.
        batch: Sequences of a pass over all devices; the recipe's when absent.
        device: A100, H100, 'RTX 4090', L4, or cpu: this machine, measured now.
        count: How many of them.
        price: Of one device for an hour, in whatever you pay with.
        table: Compare mechanisms over context lengths.
        contexts: The lengths of the table, as in 2048,8192; the recipe's context, 4 and 16 times it when
            absent.
        threads: Threads of the cpu; as PyTorch chooses when absent.
        json: Print JSON instead of tables.
        override: A setting of the recipe that differs, such as train.steps=100; the word alone says it too.
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
        contexts=contexts,
        threads=threads,
        as_json=json,
    )


def _write_report(folder: str, *, whole: bool = True, against: str | None = None) -> None:
    from headgate.compare import results as of_study
    from headgate.compare.tables import print_against, print_results
    from headgate.report.page import write_page

    results = of_study.write_results(folder)
    differences = None if against is None else of_study.against(results, against)
    page = write_page(folder)
    print_results(results)
    if against is not None and differences is not None:
        print()
        print_against(against, differences)
    print(f"\nthe page is {page}; results.json and results.md beside it have the numbers")
    if not whole:
        sys.exit(1)


SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*=")
"""A word such as train.steps=100, which may stand anywhere among a command's own."""
COMMANDS: dict[str, Callable[..., None]] = {
    "mechanisms": mechanisms,
    "prepare": prepare,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "convert": convert,
    "compare": compare,
    "ablate": ablate,
    "report": report,
    "bench": bench,
    "plan": plan,
}


def overview() -> str:
    """What `headgate --help` prints: made from the commands' own docstrings, without importing a parser."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: headgate COMMAND [OPTIONS]",
        "",
        "Does this attention mechanism beat plain attention, by how much, at what cost?",
        "",
        "commands:",
        *(f"  {name:<{width}}  {inspect.getdoc(run).splitlines()[0]}" for name, run in COMMANDS.items()),  # type: ignore[union-attr]
        "",
        "headgate COMMAND --help tells a command's options; headgate --version the version.",
    ]
    return "\n".join(lines)


def run(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return
    if arguments[0] == "--version":
        print(f"headgate {__version__}")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise HeadgateError(f"unknown command {name!r}; {suggestion(name, COMMANDS)}")
    import tyro

    settings: tuple[Any, ...] = (tyro.conf.OmitArgPrefixes,)
    if "override" in inspect.signature(COMMANDS[name]).parameters:
        rest = [part for word in rest for part in (("--override", word) if SETTING.match(word) else (word,))]
        settings += (tyro.conf.UseAppendAction,)  # each such word is one of several
    tyro.cli(COMMANDS[name], prog=f"headgate {name}", args=rest, config=settings)


def main() -> None:
    try:
        run(sys.argv[1:])
    except HeadgateError as error:
        rank = os.environ.get("RANK", "0")  # under torchrun, most errors are those of every process
        print(f"headgate{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("headgate: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left, as `| head` does; nothing is wrong here
