"""What a model is: its sizes, its variants, and what it costs to hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tokentight.kernels.interface import HeadShape
from tokentight.models.errors import UnsupportedModelError
from tokentight.models.rope import RopeConfig

if TYPE_CHECKING:
    from tokentight.models.partition import LayerRange

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

KV_ITEM_BYTES = 4
"""Keys and values are kept in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder of the Llama family.

    `layer_windows[i]` is the sliding window of layer `i` in positions, itself included, or None
    for full attention. `checkpoint_dtype` is what the file holds, `weight_dtype` how matrices
    stand in memory (float32 or bfloat16); norms and biases are float32 always.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: HeadShape
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    checkpoint_dtype: str
    weight_dtype: torch.dtype

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers")
        for name in (*sizes, "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise UnsupportedModelError(
                f"rms_norm_eps is {self.rms_norm_eps}; it must be a number not below 0"
            )
        if self.heads.head_dim < 2 or self.heads.head_dim % 2:
            raise UnsupportedModelError(
                f"head_dim is {self.heads.head_dim}; rotary embeddings need an even number"
            )
        if len(self.layer_windows) != self.num_layers:
            raise UnsupportedModelError(
                f"there are {len(self.layer_windows)} layer types for {self.num_layers} layers"
            )
        if any(window is not None and window < 1 for window in self.layer_windows):
            raise UnsupportedModelError("a sliding window must be at least 1 position")
        if self.weight_dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModelError(
                f"weight_dtype is {self.weight_dtype}; it must be float32 or bfloat16"
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read a Hugging Face `config.json` and, for its end tokens, `generation_config.json`.

        Raises:
            UnsupportedModelError: naming the field, its value and what is supported.
        """
        from tokentight.models.hf_config import model_config_from_hf

        return model_config_from_hf(config, generation_config)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]
    ) -> ModelConfig:
        """Read a GGUF file's metadata; its tensors' names and `[out, in]` shapes tell the rest.

        Raises:
            UnsupportedModelError: naming the field, its value and what is supported.
        """
        from tokentight.models.gguf_config import model_config_from_gguf

        return model_config_from_gguf(metadata, tensor_shapes)

    @property
    def context_length(self) -> int:
        """Positions the model is made for: with YaRN its original length times the factor."""
        if self.rope.rope_type != "yarn":
            return self.max_position_embeddings
        stretched = int(self.rope.original_max_positions * self.rope.factor)
        return max(self.max_position_embeddings, stretched)

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.heads.head_dim)

    @property
    def layer_matrix_parameters(self) -> int:
        """Elements of one layer's weight matrices."""
        head_dim = self.heads.head_dim
        q, kv = self.heads.num_heads * head_dim, self.heads.num_kv_heads * head_dim
        attention = (q + 2 * kv) * self.hidden_size + self.hidden_size * q
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_vector_parameters(self) -> int:
        """Elements of one layer's norms and biases."""
        head_dim = self.heads.head_dim
        count = 2 * self.hidden_size
        if self.qkv_bias:
            count += (self.heads.num_heads + 2 * self.heads.num_kv_heads) * head_dim
        if self.output_bias:
            count += self.hidden_size
        if self.mlp_bias:
            count += 2 * self.intermediate_size + self.hidden_size
        if self.qk_norm:
            count += 2 * head_dim
        return count

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding, and as many of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Elements of the whole model; a tied head is counted once."""
        layer = self.layer_matrix_parameters + self.layer_vector_parameters
        tables = self.embedding_parameters * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables + self.hidden_size

    def weight_bytes(self, layers: LayerRange) -> int:
        """Bytes of memory that the weights of a stage with `layers` take.

        A stage with a tied head but without the embedding holds a copy of its own.
        """
        matrices = layers.num_layers * self.layer_matrix_parameters
        vectors = layers.num_layers * self.layer_vector_parameters
        shared = layers.has_embedding and layers.has_head and self.tie_word_embeddings
        tables = layers.has_embedding + layers.has_head - shared
        matrices += tables * self.embedding_parameters
        if layers.has_head:
            vectors += self.hidden_size
        return matrices * self.weight_dtype.itemsize + vectors * 4

    def kv_bytes_per_token(self, layers: LayerRange) -> int:
        """Bytes of keys and values that one position takes in `layers`."""
        per_layer = 2 * self.heads.num_kv_heads * self.heads.head_dim * KV_ITEM_BYTES
        return layers.num_layers * per_layer
