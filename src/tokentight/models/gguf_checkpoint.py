"""Checkpoints of one GGUF file, dequantised tensor by tensor."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokentight.models.checkpoint import (
    WeightDtype,
    check_shapes,
    resolve_dtype,
    to_memory_dtype,
)
from tokentight.models.config import ModelConfig
from tokentight.models.errors import CheckpointError
from tokentight.models.gguf_config import gguf_architecture, with_frequency_factors
from tokentight.models.gguf_file import GgufFile, GgufTensor

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_DEQUANTISED_AT_ONCE = 1 << 18
_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """See `Checkpoint`. `names` maps Hugging Face names to the file's own.

    llama.cpp stores Q and K of llama models with the two halves of each head interleaved, as its
    RoPE wants them; they are put back here. Qwen models are stored as they are.
    """

    config: ModelConfig
    file: GgufFile
    names: dict[str, str]
    permuted: bool

    @classmethod
    def open(cls, path: Path, dtype: WeightDtype) -> GgufCheckpoint:
        """Read the metadata and the tensor directory; see `open_checkpoint` for errors."""
        file = GgufFile.open(path)
        shapes = {name: entry.shape for name, entry in file.tensors.items()}
        config = ModelConfig.from_gguf(file.metadata, shapes)
        names = {_hf_name(name): name for name in shapes if name != _ROPE_FACTORS}
        check_shapes(config, {hf: shapes[name] for hf, name in names.items()}, path)
        stored = {hf: _type_name(file, name) for hf, name in names.items() if len(shapes[name]) > 1}
        for name in shapes:
            _bytes(file, name)  # a file cut short is found now and not in the middle of loading
        kinds = set(stored.values())
        if _ROPE_FACTORS in shapes:
            factors = _read(file, _ROPE_FACTORS).double().tolist()
            config = with_frequency_factors(config, tuple(factors))
        config = dataclasses.replace(
            config,
            checkpoint_dtype=kinds.pop()
            if len(kinds) == 1
            else "mixed: " + ", ".join(sorted(kinds)),
            weight_dtype=resolve_dtype(dtype, stored),
        )
        permuted = gguf_architecture(file.metadata) == "llama"
        return cls(config, file, names, permuted)

    def tensor(self, name: str) -> Tensor:
        """See `Checkpoint.tensor`."""
        if name not in self.names:
            raise CheckpointError(f"there is no tensor {name!r} in the checkpoint")
        tensor = _read(self.file, self.names[name])
        if self.permuted and ".self_attn.q_proj." in name:
            tensor = _halves_apart(tensor, self.config.heads.num_heads)
        if self.permuted and ".self_attn.k_proj." in name:
            tensor = _halves_apart(tensor, self.config.heads.num_kv_heads)
        return to_memory_dtype(tensor, self.config)


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; unknown names stay and are reported as such."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _type_name(file: GgufFile, name: str) -> str:
    from gguf import GGMLQuantizationType

    type_id = file.tensors[name].type_id
    known = {int(kind): str(kind.name) for kind in GGMLQuantizationType}
    kind = known.get(type_id, f"type {type_id}")
    if kind not in SUPPORTED_TYPES:
        raise CheckpointError(
            f"{name} in {file.path} is stored as {kind}; supported are "
            f"{', '.join(SUPPORTED_TYPES)}. Use a file quantised as one of these, e.g. Q4_K_M or "
            "Q8_0"
        )
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind, kind)


def _row_bytes(file: GgufFile, name: str) -> int:
    """Bytes of one row of a tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = _type_name(file, name)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(file.tensors[name].type_id)]
    columns = file.tensors[name].shape[-1]
    if columns % block:
        raise CheckpointError(
            f"{name} in {file.path} has rows of {columns}, which {kind} cannot hold"
        )
    return int(columns // block * block_bytes)


def _bytes(file: GgufFile, name: str) -> NDArray[np.uint8]:
    """The bytes of a tensor, mapped and not yet read: uint8 `[..., bytes of a row]`."""
    leading, row = file.tensors[name].shape[:-1], _row_bytes(file, name)
    raw = file.bytes_of(name, math.prod(leading) * row)
    return raw.reshape(*leading, row)


def _read(file: GgufFile, name: str) -> Tensor:
    """One tensor, dequantised to float32; bfloat16 stays."""
    shape = file.tensors[name].shape
    kind = _type_name(file, name)
    raw = _bytes(file, name)
    if kind == "bfloat16":
        return torch.from_numpy(raw.view("<i2").copy()).view(torch.bfloat16).reshape(shape)
    if kind in ("float32", "float16"):
        values = raw.view("<f4" if kind == "float32" else "<f2").astype(np.float32, copy=True)
    else:
        values = _dequantised(raw, file.tensors[name])
    return torch.from_numpy(values).reshape(shape)


def _dequantised(raw: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    columns = tensor.shape[-1]
    kind = GGMLQuantizationType(tensor.type_id)
    rows = raw.reshape(-1, raw.shape[-1])
    values = np.empty((rows.shape[0], columns), dtype=np.float32)
    step = max(1, _DEQUANTISED_AT_ONCE // columns)
    for start in range(0, rows.shape[0], step):
        # The package works on 16 rows at a time, which is slow for short ones: give it one long.
        part = rows[start : start + step].reshape(1, -1)
        values[start : start + step] = dequantize(part, kind).reshape(-1, columns)
    return values


def _halves_apart(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from interleaved (0, half, 1, half + 1, ...) to half after half."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape).contiguous()
