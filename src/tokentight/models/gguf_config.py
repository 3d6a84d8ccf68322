"""From a GGUF file's metadata to a `ModelConfig`, through the names Hugging Face gives things."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokentight.models.config import ModelConfig
from tokentight.models.errors import UnsupportedModelError
from tokentight.models.hf_config import model_config_from_hf

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def gguf_architecture(metadata: Mapping[str, Any]) -> str:
    """`general.architecture`, if it is one that is served.

    Raises:
        UnsupportedModelError: naming those that are.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"general.architecture of the GGUF file is {architecture!r}; supported are "
            f"{', '.join(GGUF_ARCHITECTURES)} (llama holds Llama and Mistral models)"
        )
    return str(architecture)


def model_config_from_gguf(
    metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]
) -> ModelConfig:
    """See `ModelConfig.from_gguf`."""
    architecture = gguf_architecture(metadata)
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"the GGUF file is one of {metadata['split.count']} parts; join them first with "
            "llama.cpp's `llama-gguf-split --merge`"
        )
    if metadata.get(f"{architecture}.expert_count", 0):
        raise UnsupportedModelError(
            "the GGUF file holds a mixture of experts; only dense models are served"
        )
    if "token_embd.weight" not in tensor_shapes:
        raise UnsupportedModelError("the GGUF file holds no token_embd.weight: not a whole model")
    return model_config_from_hf(_hf_config(metadata, architecture, tensor_shapes))


def with_frequency_factors(config: ModelConfig, factors: tuple[float, ...]) -> ModelConfig:
    """The configuration of a file that carries its RoPE scaling as a tensor (Llama 3.1 does).

    Raises:
        UnsupportedModelError: when there is not one factor for each pair of dimensions.
    """
    if len(factors) != config.heads.head_dim // 2:
        raise UnsupportedModelError(
            f"rope_freqs.weight has {len(factors)} factors; a head_dim of {config.heads.head_dim} "
            f"needs {config.heads.head_dim // 2}"
        )
    return dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, frequency_factors=factors)
    )


def _hf_config(
    metadata: Mapping[str, Any], architecture: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    def of(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    def needed(key: str) -> Any:
        value = of(key)
        if value is None:
            raise UnsupportedModelError(f"the GGUF file does not state {architecture}.{key}")
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{architecture}.{key} differs from layer to layer; only models whose layers are "
                "alike are served"
            )
        return value

    vocab_size, hidden_size = shapes["token_embd.weight"]
    num_heads = needed("attention.head_count")
    num_kv_heads = needed("attention.head_count_kv") if of("attention.head_count_kv") else num_heads
    head_dim = of("attention.key_length") or hidden_size // num_heads
    if of("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("heads whose values are longer than their keys are not served")
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": needed("embedding_length"),
        "intermediate_size": needed("feed_forward_length"),
        "num_hidden_layers": needed("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": needed("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": needed("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "partial_rotary_factor": of("rope.dimension_count", head_dim) / head_dim,
        "rope_parameters": _rope_parameters(metadata, architecture),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
    }
    window = of("attention.sliding_window") or None
    if architecture != "llama":
        # Which layers a window covers is not recorded for Qwen, whose published models do not
        # use theirs; llama.cpp ignores it too.
        return {"architectures": [f"Qwen{architecture[-1]}ForCausalLM"], **config}
    if window is not None:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window, **config}
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        **config,
    }


def _rope_parameters(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    prefix = f"{architecture}.rope"
    kind = metadata.get(f"{prefix}.scaling.type", "none")
    parameters: dict[str, Any] = {
        "rope_theta": metadata.get(f"{prefix}.freq_base", 10000.0),
        "rope_type": "default" if kind == "none" else kind,
    }
    names = {
        "factor": "scaling.factor",
        "original_max_position_embeddings": "scaling.original_context_length",
        "beta_fast": "scaling.yarn_beta_fast",
        "beta_slow": "scaling.yarn_beta_slow",
    }
    for name, key in names.items():
        if f"{prefix}.{key}" in metadata:
            parameters[name] = metadata[f"{prefix}.{key}"]
    return parameters


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    keys = ("eos_token_id", "eot_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return [token_id for token_id in found if token_id is not None]
