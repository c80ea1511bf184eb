"""From one form of a model to another: Hugging Face's families and headgate, in both directions.

A headgate folder holds `model.safetensors`, which `headgate.load` reads, and beside it the `config.json` and
tokenizer files through which transformers reads the same folder once `headgate.model.hf` is imported. The
folder of another family works without headgate.

Tensors are mapped from the files that hold them and written from there, one after another, so a model larger
than memory can be converted. The folder is made under a temporary name: once visible, it is complete.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from headgate.config import Config, ModelConfig, load, to_dict
from headgate.errors import HeadgateError, suggestion
from headgate.files import named, read_json, write_text
from headgate.mechanisms.contract import Mechanism, initialise
from headgate.model import families, remote
from headgate.model.decoder import Decoder, header_config, header_of, model_file, with_mechanism
from headgate.model.tensors import write_tensors
from headgate.model.weights import MODEL_TYPE, PREFIX, Weights, remembered, settings_config

Form = Literal["headgate", families.Family]
ARCHITECTURE = remote.CLASSES["AutoModelForCausalLM"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CARRIED = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Settings of a config.json that our config has no place for but other tools need."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
END_OF_TEXT = "<|endoftext|>"
"""The token that ends a text if a tokenizer has several special ones and nothing beside it says which."""


@dataclass(frozen=True)
class Source:
    """A model as found: our config, where each of our tensors is, and what comes with it."""

    form: str
    config: ModelConfig
    weights: Weights
    names: Mapping[str, str]
    """Our name -> the name in `weights`."""
    folder: Path
    """Where the tokenizer is, if there is one."""
    carried: Mapping[str, Any]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of one of our tensors; None if it is missing."""
        theirs = self.names.get(name)
        return None if theirs is None or theirs not in self.weights else self.weights.shape(theirs)


@dataclass(frozen=True)
class Converted:
    """What was written, for the user."""

    source: str
    """The form of the source: headgate, qwen2, qwen3, llama or mistral."""
    form: str
    parameters: int
    dtype: str
    changes: tuple[str, ...]
    """What a changed mechanism starts as, one sentence each."""


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Form = "headgate",
    mechanism: str | list[str] | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> Converted:
    """Write the model of `source` to the new folder `out`, with another mechanism if one is named.

    Parameters that the new mechanism shares with the old are kept; new ones start as full attention if they
    can. `seed` is for new parameters that start at random.
    """
    if dtype is not None and dtype not in DTYPES:
        raise HeadgateError(f"dtype={dtype!r} is not a choice; {suggestion(dtype, DTYPES)}")
    out = named(out, "the folder to write")
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise HeadgateError(f"{str(out)!r} exists already; choose another folder, or remove it")
    found = read_source(named(source, "the source"))
    config = with_mechanism(found.config, mechanism)
    settings = _headgate_settings(config) if to == "headgate" else families.write_settings(config, to)
    with torch.device("meta"):
        decoder = Decoder(config)
    fresh, changes = ({}, []) if mechanism is None else _open_mechanisms(decoder, found, seed)
    tensors = {
        name: found.weights.tensor(found.names[name]) for name in _checked_names(decoder, found, fresh)
    }
    kept = next(iter(tensors.values())).dtype
    tensors |= {name: tensor.to(kept) for name, tensor in fresh.items()}
    if dtype is not None:
        tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    parameters = sum(tensor.numel() for tensor in tensors.values())
    stored = next(iter(tensors.values())).dtype
    settings |= {**found.carried, "dtype": str(stored).removeprefix("torch.")}
    header = {}
    if to == "headgate":
        header = header_of(config)
    else:
        tensors = families.tensors_as(to, config, tensors)
    _write(out, tensors, header, settings, found)
    return Converted(found.form, to, parameters, settings["dtype"], tuple(changes))


def read_source(path: Path) -> Source:
    """Find out what a file or folder holds, and check that it is complete; no tensor is read yet."""
    if not path.exists():
        raise HeadgateError(
            f"{str(path)!r} does not exist; expected a folder with a model or a .safetensors file (from the "
            "Hub: hf download NAME --local-dir FOLDER)"
        )
    settings = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if "model_type" not in settings:
        if not path.is_dir() or _holds_ours(path):
            return _ours(path)
        Weights.of_folder(path)  # raises if its weights are what is wrong
        raise HeadgateError(
            f"{str(path)!r} has no config.json with a model_type; expected a folder of Qwen, Llama, Mistral "
            "or headgate"
        )
    carried = {name: settings[name] for name in CARRIED if settings.get(name) is not None}
    where = str(path / "config.json")
    if settings["model_type"] == MODEL_TYPE:
        config = settings_config(settings, where)
        weights = Weights.of_folder(path)
        names = {name.removeprefix(PREFIX): name for name in weights.names()}
        return Source(MODEL_TYPE, config, weights, names, path, carried)
    config = families.read_settings(settings, where)
    weights = Weights.of_folder(path)
    names = families.tensor_names(config)
    if MODEL_TYPE in settings:
        config = _with_used(config, settings, where)
        names |= {families.our_name(name): name for name in weights.names() if ".mechanism." in name}
    # A tied model's output weights are its embedding's, whether they are stored again or not.
    unknown = sorted(weights.names() - set(names.values()) - {"lm_head.weight"})
    if unknown:
        raise HeadgateError(
            f"{str(path)!r} has a tensor {unknown[0]!r} that {settings['model_type']} does not; is its "
            "config.json the right one?"
        )
    return Source(settings["model_type"], config, weights, names, path, carried)


def _with_used(config: ModelConfig, settings: Mapping[str, Any], where: str) -> ModelConfig:
    """With the mechanisms that `headgate.model.hf.use` put into the layers."""
    used, layers = remembered(config, settings, repr(where))
    each = [(used if n in layers else config).layer_mechanism(n) for n in range(config.n_layers)]
    return replace(config, mechanism=tuple(each))


def _holds_ours(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file() or any(folder.glob("checkpoints/step-*/*.safetensors"))


def _ours(path: Path) -> Source:
    """A file written by Decoder.save, a checkpoint, or a run folder."""
    file = model_file(path)
    config, weights = header_config(file), Weights.of_file(file)
    folder, above = file.parent, file.resolve().parent.parent
    carried = {}
    if above.name == "checkpoints" and (above.parent / "config.json").is_file():
        folder = above.parent
        carried["max_position_embeddings"] = load(Config, folder / "config.json").train.context
    return Source(MODEL_TYPE, config, weights, {name: name for name in weights.names()}, folder, carried)


def _open_mechanisms(decoder: Decoder, source: Source, seed: int) -> tuple[dict[str, Tensor], list[str]]:
    """The parameters that the source lacks, set to full attention; and what the changed layers start as."""
    fresh, remarks = {}, []
    for n, layer in enumerate(decoder.layers):
        prefix = f"layers.{n}.attention.mechanism."
        mechanism = cast(Mechanism, layer.get_submodule("attention.mechanism"))
        before, after = source.config.layer_mechanism(n), decoder.config.layer_mechanism(n)
        expected = {prefix + name: tuple(p.shape) for name, p in mechanism.named_parameters()}
        stored = {name: source.shape(name) for name in source.names if name.startswith(prefix)}
        if before.name != after.name or stored != expected:
            mechanism.to_empty(device="cpu")
            fresh[prefix] = mechanism, before.name, after.name
        elif before != after:
            remarks.append(f"{after.name} keeps its weights under other options")
    initialise(decoder, seed)  # all but the new ones are on the meta device, and left alone
    tensors: dict[str, Tensor] = {}
    for prefix, (mechanism, before_name, after_name) in fresh.items():
        reach = mechanism.start_as_full()
        if mechanism.options.positions == "none":
            reach = 0  # the weights were trained with rotated keys
        remarks.append(
            _start(after_name, reach) if before_name == "full" else _replaced(before_name, after_name)
        )
        tensors |= {prefix + name: parameter.detach() for name, parameter in mechanism.named_parameters()}
    return tensors, list(dict.fromkeys(remarks))


def _replaced(before: str, after: str) -> str:
    return f"{after} replaces {before}, so the model starts changed"


def _start(name: str, reach: float) -> str:
    if reach == 0:
        return f"{name} has no state in which it is full attention, so the model starts changed"
    if reach == float("inf"):
        return f"{name} starts as full attention, at every position"
    return f"{name} starts as full attention at the first {reach:,} positions, and changes the model beyond"


def _checked_names(decoder: Decoder, source: Source, fresh: Mapping[str, Tensor]) -> list[str]:
    """The tensors that come from the source, once it is certain that it has them all with the right
    shapes."""
    needed = {name: tuple(t.shape) for name, t in decoder.state_dict().items() if name not in fresh}
    for name, shape in needed.items():
        given = source.shape(name)
        if given != shape:
            raise HeadgateError(
                f"{str(source.folder)!r} does not fit its config: {source.names.get(name, name)} is "
                f"{given or 'missing'}, expected {shape}"
            )
    known = {name for name in source.names if ".mechanism." not in name}
    unknown = sorted(known - needed.keys())
    if unknown:
        raise HeadgateError(f"{str(source.folder)!r} does not fit its config: it also has {unknown[0]}")
    return list(needed)


def _headgate_settings(config: ModelConfig) -> dict[str, Any]:
    loaded_by = {"architectures": [ARCHITECTURE], "auto_map": remote.auto_map(remote.CLASSES)}
    return {"model_type": MODEL_TYPE, **loaded_by, **to_dict(config)}


def _write(
    out: Path, tensors: dict[str, Tensor], header: dict[str, str], settings: dict[str, Any], source: Source
) -> None:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name in TOKENIZER_FILES:
            if (source.folder / name).is_file():
                _refuse_link(source.folder / name)
                shutil.copyfile(source.folder / name, temporary / name)
        settings |= _describe_tokenizer(temporary)
        if header:
            remote.write_loader(temporary, remote.CLASSES)
        write_tensors(temporary / "model.safetensors", tensors, header)
        write_text(temporary / "config.json", json.dumps(settings, indent=2, allow_nan=False) + "\n")
        if out.is_dir():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise HeadgateError(f"{str(out)!r} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_link(path: Path) -> None:
    """A link could lead to any file on this machine, which would be passed on; the Hub's cache consists of
    links to its own files."""
    cache = path.parent.resolve().parent.parent / "blobs"
    if path.is_symlink() and path.resolve().parent != cache:
        raise HeadgateError(f"{str(path)!r} is a link to a file elsewhere; put the file itself there")


def _describe_tokenizer(folder: Path) -> dict[str, Any]:
    """Beside a tokenizer.json alone, as in a run, write what transformers needs to know about it."""
    if not (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
        return {}
    added = read_json(folder / "tokenizer.json").get("added_tokens") or []
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    ends = [END_OF_TEXT] if END_OF_TEXT in special else list(special) if len(special) == 1 else []
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    settings |= {role: ends[0] for role in ("eos_token", "pad_token") if ends}
    write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    return {"eos_token_id": special[ends[0]], "pad_token_id": special[ends[0]]} if ends else {}
