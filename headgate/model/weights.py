"""The tensors of a folder in Hugging Face's layout, whole or in shards, and our config beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from headgate.config import ModelConfig, from_dict, to_dict
from headgate.errors import HeadgateError
from headgate.files import read_json
from headgate.model.tensors import TensorFile

INDEX = "model.safetensors.index.json"
MODEL_TYPE = "headgate"
"""What transformers calls our models; `headgate.model.hf` registers them."""
PREFIX = "decoder."
"""The prefix of our tensors' names when transformers has saved them."""


class Weights:
    """The tensors of one safetensors file, or of a folder's shards; each is read when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        opened = {path: _open(path) for path in sorted(set(files.values()))}
        self._opened = {name: opened[path] for name, path in files.items()}
        inside = {path: set(file.keys()) for path, file in opened.items()}
        for name, path in files.items():
            if name not in inside[path]:
                raise HeadgateError(f"{str(path)!r} has no tensor {name!r}, though {INDEX} says so")

    @classmethod
    def of_file(cls, path: Path) -> "Weights":
        return cls(dict.fromkeys(_open(path).keys(), path))

    @classmethod
    def of_folder(cls, folder: Path) -> "Weights":
        if (folder / INDEX).is_file():
            names = read_json(folder / INDEX).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise HeadgateError(f"{str(folder / INDEX)!r} has no weight_map from tensors to files")
            missing = sorted({name for name in names.values() if not (folder / Path(name).name).is_file()})
            if missing:
                raise HeadgateError(f"{str(folder)!r} lacks the shard {missing[0]!r} that its {INDEX} names")
            return cls({tensor: folder / Path(name).name for tensor, name in names.items()})
        if (folder / "model.safetensors").is_file():
            return cls.of_file(folder / "model.safetensors")
        pickled = sorted(path.name for end in ("bin", "pt", "pth") for path in folder.glob(f"*.{end}"))
        if pickled:
            raise HeadgateError(
                f"{str(folder)!r} has its weights only as pickle ({pickled[0]}), which can run code when "
                "it is opened; save it as safetensors first"
            )
        raise HeadgateError(f"{str(folder)!r} has no weights; expected model.safetensors or {INDEX}")

    def __contains__(self, name: object) -> bool:
        return name in self._opened

    def names(self) -> set[str]:
        return set(self._opened)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._opened[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[name].get_tensor(name)
        return tensor


def settings_config(settings: Mapping[str, Any], where: str) -> ModelConfig:
    """The decoder's config from the settings in a config.json; `where` is that file, for errors."""
    known = set(ModelConfig.__dataclass_fields__)
    return from_dict(ModelConfig, {k: v for k, v in settings.items() if k in known}, where=where)


def remembered(config: ModelConfig, settings: Mapping[str, Any], where: str) -> tuple[ModelConfig, list[int]]:
    """The config with the mechanism that `headgate.model.hf.use` put into a model of another family before it
    was saved, and the layers that have it."""
    kept = settings.get(MODEL_TYPE)
    if not isinstance(kept, Mapping) or not {"mechanism", "layers"} <= kept.keys():
        raise HeadgateError(f"{where} was not saved with a mechanism; name one, such as 'dynamic-sparse'")
    layers = kept["layers"]
    if not isinstance(layers, list) or not all(n in range(config.n_layers) for n in layers):
        raise HeadgateError(
            f"{where} has a mechanism in layers={layers}; expected numbers from 0 to {config.n_layers - 1}"
        )
    return from_dict(ModelConfig, to_dict(config) | {"mechanism": kept["mechanism"]}, where=where), layers


def _open(path: Path) -> Any:
    TensorFile(path).verify()
    return safe_open(path, framework="pt")
