"""Checkpoints of Hugging Face safetensors, in one file or in shards."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tokentight.models.checkpoint import (
    WeightDtype,
    check_shapes,
    resolve_dtype,
    to_memory_dtype,
)
from tokentight.models.config import ModelConfig
from tokentight.models.errors import CheckpointError
from tokentight.models.model_directory import read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class SafetensorsCheckpoint:
    """See `Checkpoint`. `files[name]` is the file that holds a tensor."""

    config: ModelConfig
    files: dict[str, Path]

    @classmethod
    def open(cls, directory: Path, dtype: WeightDtype) -> SafetensorsCheckpoint:
        """Read the configuration and every file's header; see `open_checkpoint` for errors."""
        shards = _shards(directory)
        config = ModelConfig.from_hf(
            read_json(directory / "config.json"),
            read_json(directory / "generation_config.json", required=False),
        )
        files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        stored: dict[str, str] = {}
        for shard in shards:
            for name, (kind, shape) in _header(shard).items():
                files[name] = shard
                shapes[name] = shape
                stored[name] = _dtype_name(kind, name, shard)
        check_shapes(config, shapes, directory)
        matrices = {name: kind for name, kind in stored.items() if len(shapes[name]) > 1}
        return cls(dataclasses.replace(config, weight_dtype=resolve_dtype(dtype, matrices)), files)

    def tensor(self, name: str) -> Tensor:
        """See `Checkpoint.tensor`."""
        from safetensors import safe_open

        if name not in self.files:
            raise CheckpointError(f"there is no tensor {name!r} in the checkpoint")
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        converted = to_memory_dtype(tensor, self.config)
        # What safetensors returns is the mapped file itself; weights being served must not change
        # when somebody writes over it.
        return converted.clone() if converted is tensor else converted


def _shards(directory: Path) -> list[Path]:
    """The files that make up the checkpoint, each of which exists."""
    index = directory / _INDEX
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map; fetch it again")
        names = sorted(set(map(str, weight_map.values())))
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index} names a file outside its directory")
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise CheckpointError(
                f"{directory} lacks {len(missing)} of {len(names)} shards: "
                f"{', '.join(missing[:3])}. Fetch them into the directory"
            )
        return [directory / name for name in names]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"{directory} holds {len(found)} safetensors files and neither {_SINGLE} nor {_INDEX}, "
            "so which of them make up the model is not known"
        )
    if any(file for pattern in _PICKLES for file in directory.glob(pattern)):
        raise CheckpointError(
            f"{directory} holds its weights as pickles only (.bin, .pt). They can run code when "
            "opened and are never read: use the safetensors version of the model, or convert it "
            "with save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(
        f"{directory} holds no weights: neither {_SINGLE}, {_INDEX} nor a .gguf file"
    )


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of a safetensors file, without touching its data."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file, or is cut short or damaged ({error}). "
            "Fetch it again"
        ) from error


def _dtype_name(stored: str, name: str, path: Path) -> str:
    if stored not in _DTYPES:
        raise CheckpointError(
            f"{name} in {path} is stored as {stored}; supported are {', '.join(_DTYPES)}. "
            "Use the unquantised model, or a GGUF file of it"
        )
    return _DTYPES[stored]
