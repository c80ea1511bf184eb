"""Our decoder inside transformers: saved and loaded, padded, generating, trained, in a pipeline."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headgate
from headgate.config import ModelConfig
from headgate.data.tokenizers import make_tokenizer
from headgate.errors import HeadgateError
from headgate.model.convert import convert
from headgate.model.decoder import Decoder, with_mechanism

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'headgate[hf]'")

from headgate.model.hf import HeadgateConfig, HeadgateForCausalLM  # noqa: E402

MICRO = ModelConfig(
    vocab_size=257,
    d_model=24,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_mlp=40,
    shared_options={"window": 5, "max_window": 9, "dense_prefix": 12, "block": 4, "stride": 4, "hidden": 8},
)
NAMES = [name for name in headgate.mechanisms() if not name.endswith("-example")]
each_mechanism = pytest.mark.parametrize("name", NAMES)


def build(name: str = "dynamic-sparse", **changes: Any) -> HeadgateForCausalLM:
    """A model with weights large enough for its layers to matter."""
    config = with_mechanism(ModelConfig(**{**MICRO.__dict__, **changes}), name)
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter_name, parameter in decoder.named_parameters():
            if parameter.ndim > 1 and ".mechanism." not in parameter_name:
                parameter.mul_(0.3 / parameter.std())
    return HeadgateForCausalLM.of(decoder).eval()


def prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """Padding is the token 7, to show if it is ever looked at."""
    width = max(map(len, rows))
    pads = [(width - len(row), 0) if side == "left" else (0, width - len(row)) for row in rows]
    return {
        "input_ids": torch.stack([F.pad(row, pad, value=7) for row, pad in zip(rows, pads, strict=True)]),
        "attention_mask": torch.stack(
            [F.pad(torch.ones_like(row), pad) for row, pad in zip(rows, pads, strict=True)]
        ),
    }


@each_mechanism
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_token(name: str, side: str) -> None:
    model, rows = build(name), prompts(30, 1, 17, 30)
    batch = padded(rows, side)
    with torch.no_grad():
        logits = model(**batch).logits
        for n, row in enumerate(rows):
            real = batch["attention_mask"][n].bool()
            alone = model.decoder(row[None])[0]
            assert torch.allclose(logits[n, real], alone, rtol=0, atol=1e-5)
            assert alone.std() > 0.3


@each_mechanism
def test_generate_continues_every_row_as_if_it_were_alone(name: str) -> None:
    """Greedy, with our cache on prompts of different lengths, and without a cache."""
    model, rows = build(name), prompts(9, 3, 14, 9)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 7}
    together = model.generate(**padded(rows, "left"), **settings)
    uncached = model.generate(**padded(rows, "left"), **settings, use_cache=False)
    assert torch.equal(together, uncached)
    for n, row in enumerate(rows):
        tokens = row[None]
        for _ in range(12):
            with torch.no_grad():
                tokens = torch.cat([tokens, model.decoder(tokens)[:, -1:].argmax(-1)], 1)
        assert torch.equal(together[n, -12:], tokens[0, -12:])


def test_beams_are_those_found_without_a_cache() -> None:
    model, rows = build(), prompts(9, 3)
    settings = {"max_new_tokens": 15, "num_beams": 3, "do_sample": False, "pad_token_id": 7}
    cached, uncached = (
        model.generate(**padded(rows, "left"), **settings, use_cache=use_cache) for use_cache in (True, False)
    )
    assert torch.equal(cached, uncached)


def test_a_conversation_goes_on_from_its_cache() -> None:
    """The second turn gives only what is new to the model, and prompts in chunks are prompts."""
    model, (first, second) = build("local"), prompts(9, 6)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 7}
    begun = model.generate(first[None], **settings, return_dict_in_generate=True)
    said = torch.cat([begun.sequences, second[None]], 1)
    goes_on = model.generate(said, past_key_values=begun.past_key_values, **settings)
    assert torch.equal(goes_on, model.generate(said, **settings))
    assert torch.equal(goes_on, model.generate(said, **settings, prefill_chunk_size=4))


def test_sampling_and_streaming_run() -> None:
    model, streamed = build(), []
    torch.manual_seed(0)

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            streamed.extend(tokens.flatten().tolist())

        def end(self) -> None:
            streamed.append("end")

    (alone,) = model.generate(prompts(4)[0][None], max_new_tokens=5, do_sample=False, streamer=Streamer())
    assert streamed == [*alone.tolist(), "end"]
    out = model.generate(
        **padded(prompts(4, 6), "left"), max_new_tokens=5, do_sample=True, top_p=0.9, top_k=40
    )
    assert out.shape == (2, 11)


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load_through_the_auto_classes(tied: bool, tmp_path: Path) -> None:
    model = build("context-adaptive:window=3", tied_embeddings=tied, rope_theta=5e3, norm_eps=1e-5)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    lean = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, return_logits=False)
    assert lean(prompts(5)[0][None], labels=prompts(5)[0][None]).logits is None
    assert loaded.config.decoder_config() == model.decoder.config == loaded.decoder.config
    tokens = prompts(20)[0][None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    convert(tmp_path, tmp_path / "ours")
    assert torch.equal(headgate.load(tmp_path / "ours")(tokens), model.decoder(tokens))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_what_a_checkpoint_lacks_starts_as_in_a_new_decoder(tmp_path: Path) -> None:
    model = build("full")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, mechanism="dynamic-sparse")
    fresh = Decoder(with_mechanism(MICRO, "dynamic-sparse"))
    for name, parameter in loaded.decoder.named_parameters():
        expected = fresh if ".mechanism." in name else model.decoder
        assert torch.equal(parameter, expected.get_parameter(name)), name


def test_a_config_is_the_decoders(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("headgate", mechanism=["local:window=3", "full"], d_model=64)
    assert config.hidden_size == 64
    assert config.decoder_config().mechanism[0].options == {"window": 3}
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = Decoder(config.decoder_config())
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.decoder.get_parameter(name), parameter), name
    with pytest.raises(HeadgateError, match="n_heads=3 is not a multiple of n_kv_heads=2"):
        HeadgateConfig(n_heads=3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_is_that_of_the_tokens_alone(side: str) -> None:
    model, rows = build(), prompts(12, 5, 9)
    batch = padded(rows, side)
    labels = batch["input_ids"].clone()  # padding keeps its token: it must not count all the same
    sums = [model.decoder(row[None, :-1], row[None, 1:], reduction="sum") for row in rows]
    expected = sum(sums) / sum(len(row) - 1 for row in rows)
    full, lean = model(**batch, labels=labels), model(**batch, labels=labels, return_logits=False)
    assert full.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert lean.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert full.logits.shape == (3, 12, 257)
    assert lean.logits is None
    labels[:, :6] = -100
    assert model(**batch, labels=labels).loss.item() != pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_in_steps_of_trainer_add_up_to_the_mean_loss(side: str) -> None:
    """Trainer divides by the labels that it counts itself, over all the batches of a step."""
    model, rows = build(), prompts(12, 5, 9)
    batch = padded(rows, side)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    counted = (labels[:, 1:] != -100).sum()
    expected = model(**batch, labels=labels).loss.item()
    assert model(**batch, labels=labels, num_items_in_batch=counted).loss.item() == pytest.approx(expected)
    parts = [
        model(**{name: t[n : n + 1] for name, t in batch.items()}, labels=labels[n : n + 1]).loss.item()
        for n in range(3)
    ]
    twice = [
        model(
            **{name: t[n : n + 1] for name, t in batch.items()},
            labels=labels[n : n + 1],
            num_items_in_batch=counted,
        ).loss.item()
        for n in range(3)
    ]
    assert min(parts) < sum(twice) < max(parts)
    nothing = torch.full_like(labels, -100)
    assert model(**batch, labels=nothing, num_items_in_batch=counted).loss.item() == 0


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, batch = build(), padded(prompts(12, 5), "left")
    model.train()
    found = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing == enable
        model.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], rtol=1e-4, atol=1e-7), name


def test_embeddings_can_be_resized(tmp_path: Path) -> None:
    for tied in (True, False):
        model = build(tied_embeddings=tied)
        model.resize_token_embeddings(300)
        assert model(prompts(5)[0][None]).logits.shape == (1, 5, 300)
        model.save_pretrained(tmp_path / str(tied))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(tied))
        assert loaded.decoder.config.vocab_size == 300


def holes(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    batch["attention_mask"][0, 4] = 0
    return batch


REFUSED = {
    "hole": (lambda b: holes(b), "attention_mask of row 0 has padding between tokens"),
    "no token": (lambda b: b | {"attention_mask": b["attention_mask"] * 0}, "row 0 has no token"),
    "shape": (lambda b: b | {"attention_mask": torch.ones(2, 3)}, r"attention_mask has shape \(2, 3\)"),
    "positions": (lambda b: b | {"position_ids": torch.arange(9) + 4}, "position_ids of row 0 do not count"),
    "packed with a cache": (
        lambda b: b | {"position_ids": torch.arange(9) % 4, "use_cache": True},
        "position_ids of row 0 do not count",
    ),
    "embeddings": (lambda b: {"inputs_embeds": torch.zeros(1, 2, 24)}, "give input_ids"),
    "attentions": (lambda b: b | {"output_attentions": True}, "returns no attentions or hidden states"),
    "right padding": (lambda b: padded(prompts(9, 4), "right") | {"use_cache": True}, "padded on the right"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str) -> None:
    change, words = REFUSED[case]
    with pytest.raises(HeadgateError, match=words), torch.no_grad():
        build()(**change(padded(prompts(9, 9), "left")))


@pytest.mark.parametrize("mechanism", ["dynamic-sparse", "moba", "gated-delta"])
def test_packed_positions_are_documents(mechanism: str) -> None:
    """As transformers' collator packs them, against the same documents one by one; labels across a boundary
    do not count, whether the collator ignores them or not."""
    model, documents = build(mechanism), prompts(9, 4, 17)
    packed = transformers.DataCollatorWithFlattening()([{"input_ids": d.tolist()} for d in documents])
    assert packed["position_ids"].tolist()[0][9:13] == [0, 1, 2, 3]
    out = model(**packed)
    alone = [model(input_ids=d[None], labels=d[None]) for d in documents]
    torch.testing.assert_close(out.logits[0], torch.cat([a.logits[0] for a in alone]))
    counts = [len(d) - 1 for d in documents]
    mean = sum(a.loss * n for a, n in zip(alone, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(out.loss, mean)
    names, gradients = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    ours, theirs = (torch.autograd.grad(t, gradients, allow_unused=True) for t in (out.loss, mean))
    for name, a, b in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, msg=name)
    everything = model(**packed | {"labels": packed["input_ids"]})
    torch.testing.assert_close(everything.loss, out.loss)


def test_other_caches_are_refused() -> None:
    with pytest.raises(
        HeadgateError, match="past_key_values is a DynamicCache; a headgate model keeps its own, so"
    ):
        build()(prompts(3)[0][None], past_key_values=transformers.DynamicCache())
    with pytest.raises(HeadgateError, match="assisted generation takes tokens back"):
        build().generate(prompts(3)[0][None], max_new_tokens=2, prompt_lookup_num_tokens=2)
    with pytest.raises(HeadgateError, match="cache_implementation='static' is not possible"):
        build().generate(prompts(3)[0][None], max_new_tokens=2, cache_implementation="static")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `headgate convert` makes of a checkpoint with a tokenizer beside it, as a run has it."""
    home = tmp_path_factory.mktemp("hf")
    build("head-gated").decoder.save(home / "model.safetensors")
    (home / "tokenizer.json").write_text(make_tokenizer("byte").definition)
    convert(home, home / "out")
    return home / "out"


def test_a_pipeline_generates_text(folder: Path) -> None:
    pipe = transformers.pipeline("text-generation", model=str(folder), device="cpu")
    assert isinstance(pipe.model, HeadgateForCausalLM)
    texts = ["the gate", "at the head of"]
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    alone = [pipe(text, **options)[0]["generated_text"] for text in texts]
    pipe.tokenizer.padding_side = "left"
    together = [found[0]["generated_text"] for found in pipe(texts, batch_size=2, **options)]
    assert together == alone
    assert all(alone)


def test_trainer_takes_a_few_steps(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it: pip install 'headgate[hf]'")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["the gate at the head", "of a channel", "sets how much water goes down"] * 4
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=8,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            gradient_checkpointing=True,
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=rows,
        eval_dataset=rows[:3],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    assert trainer.evaluate()["eval_loss"] < losses[0]


HARNESS = """
import json, sys
import headgate.model.hf
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

model, tasks = sys.argv[1:]
manager = TaskManager(include_path=tasks, include_defaults=False)
result = simple_evaluate(
    "hf", model_args={"pretrained": model, "dtype": "float32"}, tasks=["gates"], task_manager=manager,
    device="cpu", batch_size=4, bootstrap_iters=0,
)
print(json.dumps([[sample["doc"], sample["filtered_resps"]] for sample in result["samples"]["gates"]]))
"""
TASK = """
task: gates
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def test_the_evaluation_harness_judges_it_on_a_local_task(folder: Path, tmp_path: Path) -> None:
    """Its log-likelihoods are those that our decoder gives."""
    pytest.importorskip("lm_eval", reason="not installed: pip install lm-eval (it brings 45 packages)")
    questions = [
        {"question": "the gate at the head of a", "choices": ["channel", "zebra"], "answer": 0},
        {"question": "sets how much water", "choices": ["goes down", "sings"], "answer": 1},
    ]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "gates.jsonl").write_text("\n".join(map(json.dumps, questions)))
    task = TASK.format(questions=tmp_path / "tasks" / "gates.jsonl")
    (tmp_path / "tasks" / "gates.yaml").write_text(task)
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, str(folder), str(tmp_path / "tasks")],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    decoder, tokenizer = headgate.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    samples = json.loads(done.stdout.splitlines()[-1])
    assert len(samples) == 2
    for asked, answers in samples:
        for choice, (said, _) in zip(asked["choices"], answers, strict=True):
            words = tokenizer(f"{asked['question']} {choice}", return_tensors="pt")["input_ids"]
            before = len(tokenizer(asked["question"])["input_ids"])
            logarithms = decoder(words)[0, :-1].log_softmax(-1).gather(-1, words[0, 1:, None])[before - 1 :]
            assert said == pytest.approx(logarithms.sum().item(), abs=1e-3)


def test_without_transformers_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "headgate.model.hf")
    with pytest.raises(
        ImportError, match=r"needs transformers; install it with: pip install 'headgate\[hf\]'"
    ):
        importlib.import_module("headgate.model.hf")
