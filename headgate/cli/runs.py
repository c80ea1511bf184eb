"""Commands for one run: train, evaluate, generate and convert."""

import sys
from typing import Any, Literal

from headgate.cli.shelves import check_names
from headgate.options import RunOptions


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
    """Train a recipe with a mechanism on prepared shards, or resume the run in a folder.

    Args:
        recipe: A recipe such as 'tiny', or a config.json. Not needed to resume a run.
        out: The run folder.
        data: A folder written by `headgate prepare`. Not needed to resume a run.
        mechanism: The layers' mechanism, such as dynamic-sparse:window=64 or local+full.
        init: Start from the weights in this folder, such as one written by `headgate convert`, with that
            folder's model. A resumed run need not repeat it.
        override: Change a setting, as in train.steps=100; can also be given as a bare word.
    """
    check_names([mechanism] if mechanism else [], recipe)
    from headgate.train.start import start

    stopped_by = start(recipe, override, out=out, data=data, mechanism=mechanism, init=init, options=options)
    if stopped_by:
        sys.exit(128 + stopped_by)


def runs(folder: str = ".", /, *, json: bool = False) -> None:
    """List the runs in a folder and below it: what they train, how far they have come, their loss.

    Args:
        folder: The folder to search, such as a study. Default: the current one.
        json: Print a JSON list instead of a table.
    """
    from headgate.train.listing import print_runs

    print_runs(folder, as_json=json)


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
    by_document: bool = False,
    json: bool = False,
) -> None:
    """Evaluate a run on a split: loss, perplexity, bits per byte, loss by position, gates.

    Args:
        run: The run folder; with --data and --context, any folder or file that holds a model.
        split: val, test or train.
        tokens: Use only this many tokens from the beginning of the split. Default: all.
        checkpoint: last, best, or a step.
        data: The folder where the run's data is now, or other data. Default: where it was during training.
        context: Tokens in a sequence. Default: as in training.
        device: A device such as cpu or cuda. Default: the GPU if there is one.
        skip_below: Gate thresholds to try: how much each skips in decoding, the time saved, the loss added.
        by_document: Also show the hardest and easiest documents.
        json: Print one JSON object instead of tables.
    """
    from headgate.train.evaluate import evaluate_run
    from headgate.train.tables import print_evaluation

    skipped = []
    chosen: dict[str, Any] = {"split": split, "tokens": tokens, "which": checkpoint}
    chosen |= {"data": data, "context": context, "device": device}
    if skip_below:
        from headgate.measure.skipping import gate_skipping, print_skipping

        skipped = gate_skipping(run, skip_below, **chosen)
    result = evaluate_run(run, **chosen, by_document=5 if by_document else 0)
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
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    graphs: bool = False,
) -> None:
    """Continue a prompt with a trained model; the text is printed as it is generated.

    Args:
        run: A run folder, a checkpoint folder or a model file.
        prompt: The text to continue; - reads it from standard input.
        max_new_tokens: Stop after this many tokens if the text has not ended by then.
        temperature: Below 1 favours likely tokens; 0 always takes the likeliest.
        top_k: Sample only from the k likeliest tokens.
        top_p: Sample from the likeliest tokens that together have this probability.
        min_p: Sample from tokens whose probability is at least this share of the likeliest token's.
        repetition_penalty: Above 1 makes tokens that have already occurred less likely.
        seed: Random seed; the same seed gives the same text.
        skip_below: Skip the computation behind gates below this value.
        checkpoint: For a run folder: last, best, or a step.
        tokenizer: A tokenizer.json, or a folder that holds one. Default: the run's own.
        end_of_text: The token that ends a text. Default: the tokenizer's own.
        device: A device such as cpu or cuda. Default: the GPU if there is one.
        dtype: What to compute in. Default: bf16 on a GPU that has it, elsewhere as the weights are saved.
        graphs: Record what lies between attentions as CUDA graphs, which start faster.
    """
    from headgate.cli.prompt import computing_dtype, open_model, read_prompt, write
    from headgate.train.distributed import join

    with join(device) as world:
        decoder, words = open_model(run, which=checkpoint, tokenizer=tokenizer, end_of_text=end_of_text)
        summary = write(
            decoder.to(world.device, computing_dtype(world.device, dtype)),
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
            graphs=graphs,
        )
    print()
    print(summary, file=sys.stderr)


def convert(
    source: str,
    out: str,
    /,
    *,
    to: Literal["headgate", "qwen", "llama", "mistral", "qwen3_5", "step3p5"] = "headgate",
    mechanism: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
) -> None:
    """Convert a Hugging Face Qwen, Llama or Mistral to headgate or back, or change a model's attention.

    Args:
        source: A Hugging Face folder, a run folder, a checkpoint, or a headgate .safetensors file.
        out: The folder to write; it must be new or empty.
        to: headgate, which transformers can also read once headgate.model.hf is imported; a family that works
            without headgate (qwen, llama, mistral); or, for gated attention, qwen3_5 or step3p5.
        mechanism: The layers' new mechanism, such as dynamic-sparse:window=512 or local+full. It starts
            as full attention where it can.
        dtype: Data type of the weights. Default: as in the source.
    """
    from headgate.model.convert import convert

    done = convert(source, out, to=to, mechanism=mechanism, dtype=dtype)
    print(f"{done.source} -> {done.form}: {done.parameters:,} parameters in {done.dtype}, in {out!r}")
    for change in done.changes:
        print(change)
