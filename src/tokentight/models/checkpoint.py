"""Weights on disk, read one tensor at a time under the names Hugging Face gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from tokentight.models.config import ModelConfig
from tokentight.models.errors import CheckpointError
from tokentight.models.model_directory import only_gguf

WeightDtype = Literal["auto", "float32", "bfloat16"]

# Buffers some exporters write beside the weights; they are computed anew here.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


class Checkpoint(Protocol):
    """A model's configuration and its weights, which stay on disk until asked for."""

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> Tensor:
        """The tensor of that Hugging Face name, e.g. `model.layers.0.self_attn.q_proj.weight`.

        Matrices come as `config.weight_dtype`, norms and biases as float32.

        Raises:
            CheckpointError: when there is no such tensor.
        """
        ...


def open_checkpoint(path: Path, dtype: WeightDtype = "auto") -> Checkpoint:
    """Open a directory of safetensors, or a GGUF file; read its configuration, not its weights.

    `dtype` says how weight matrices stand in memory. `auto`: bfloat16 where all of them are
    bfloat16 in the checkpoint, else float32, to which float16 and quantised weights are widened.

    Raises:
        CheckpointError: when a file is missing, damaged, of another kind, or a tensor is missing
            or of another shape than the configuration says.
        UnsupportedModelError: when the model itself cannot be served.
    """
    if dtype not in get_args(WeightDtype):
        raise CheckpointError(f"dtype is {dtype!r}; it must be auto, float32 or bfloat16")
    if path.is_dir():
        gguf_file = only_gguf(path)
        if gguf_file is not None:
            return open_checkpoint(gguf_file, dtype)
        from tokentight.models.safetensors_checkpoint import SafetensorsCheckpoint

        return SafetensorsCheckpoint.open(path, dtype)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == ".gguf":
        from tokentight.models.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint.open(path, dtype)
    raise CheckpointError(
        f"{path} is neither a directory of safetensors nor a .gguf file; only these are read"
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a checkpoint of this configuration must hold."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Compare what a checkpoint holds with what its configuration needs.

    Raises:
        CheckpointError: naming the first tensors that are missing, misshapen or have no place.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{source} lacks {len(missing)} tensors that a {config.architecture} of this "
            f"configuration has: {_some(missing)}. Fetch it again, or check config.json"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{name} in {source} has shape {list(found[name])}; the configuration says "
                f"{list(shape)}"
            )
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    extra = [n for n in found if n not in expected and n not in ignored and not _IGNORED.search(n)]
    if extra:
        raise CheckpointError(
            f"{source} holds {len(extra)} tensors that a {config.architecture} of this "
            f"configuration has no place for: {_some(extra)}. Leaving them out would change the "
            "model's answers"
        )


def resolve_dtype(dtype: WeightDtype, stored: Mapping[str, str]) -> torch.dtype:
    """How matrices stand in memory, given what is asked for and the dtypes `stored` of them."""
    if dtype == "auto":
        all_bfloat16 = all(name == "bfloat16" for name in stored.values())
        return torch.bfloat16 if all_bfloat16 else torch.float32
    return torch.float32 if dtype == "float32" else torch.bfloat16


def to_memory_dtype(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Matrices as `config.weight_dtype`, vectors (norms and biases) as float32."""
    return tensor.to(config.weight_dtype if tensor.dim() > 1 else torch.float32)


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.heads.head_dim
    q, kv = config.heads.num_heads * head_dim, config.heads.num_kv_heads * head_dim
    matrices = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, cols, biased) in matrices.items():
        shapes[f"{name}.weight"] = (rows, cols)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}, ..."
