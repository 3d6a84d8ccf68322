"""From a Hugging Face `config.json` to a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokentight.kernels.interface import HeadShape
from tokentight.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from tokentight.models.errors import UnsupportedModelError
from tokentight.models.rope import RopeConfig

_MISTRAL_DEFAULT_WINDOW = 4096
# Far above any model; a damaged file must not make us list billions of tensors.
_MAX_LAYERS = 10_000
_QWEN3_DEFAULT_HEAD_DIM = 128


def model_config_from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """See `ModelConfig.from_hf`."""
    architecture = _architecture(config)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"quantization_config asks for {method!r}; quantised safetensors are not supported. "
            "Use the unquantised model, or a GGUF file of it"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is {activation!r}; only 'silu' is supported")
    qwen3 = architecture == "Qwen3ForCausalLM"
    attention_bias = bool(config.get("attention_bias", False))
    biased = attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=_integer(config, "hidden_size"),
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_num_layers(config),
        heads=_heads(config, architecture),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=RopeConfig.from_hf(config),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=biased or architecture == "Qwen2ForCausalLM",
        output_bias=biased,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        qk_norm=qwen3,
        layer_windows=_layer_windows(config, architecture),
        eos_token_ids=_eos_token_ids(config, generation_config or {}),
        bos_token_id=config.get("bos_token_id"),
        checkpoint_dtype=dtype,
        weight_dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32,
    )


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in SUPPORTED_ARCHITECTURES:
            return str(architecture)
    found = ", ".join(map(str, architectures)) or f"none (model_type {config.get('model_type')!r})"
    raise UnsupportedModelError(
        f"architectures in config.json is {found}; supported are "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModelError(f"{name} in config.json is {value!r}; it must be an integer")
    return value


def _num_layers(config: Mapping[str, Any]) -> int:
    value = _integer(config, "num_hidden_layers")
    if value > _MAX_LAYERS:
        raise UnsupportedModelError(f"num_hidden_layers is {value}; at most {_MAX_LAYERS} are read")
    return value


def _heads(config: Mapping[str, Any], architecture: str) -> HeadShape:
    num_heads = _integer(config, "num_attention_heads")
    if num_heads < 1:
        raise UnsupportedModelError(f"num_attention_heads is {num_heads}; it must be above 0")
    if config.get("num_key_value_heads") is None:
        num_kv_heads = num_heads
    else:
        num_kv_heads = _integer(config, "num_key_value_heads")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    if config.get("head_dim") is not None:
        head_dim = _integer(config, "head_dim")
    elif architecture == "Qwen3ForCausalLM":
        head_dim = _QWEN3_DEFAULT_HEAD_DIM
    else:
        head_dim = _integer(config, "hidden_size") // num_heads
    return HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _layer_windows(config: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    """Which layers see the last `sliding_window` positions alone, as transformers decides it."""
    num_layers = _num_layers(config)
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        if config.get("layer_types"):
            raise UnsupportedModelError(
                "layer_types in a MistralForCausalLM config are not supported; all layers of a "
                "Mistral share one sliding_window"
            )
        # A config without the key means the window Mistral 7B was published with.
        return (config.get("sliding_window", _MISTRAL_DEFAULT_WINDOW),) * num_layers
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if index >= first else None for index in range(num_layers))
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"layer_types holds {', '.join(unknown)}; supported are full_attention and "
            "sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Generation's own end tokens first, then the model's; each once."""
    ids: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids.extend([value] if isinstance(value, int) else value or [])
    return tuple(dict.fromkeys(ids))
