"""From a GGUF file's metadata to a `ModelConfig`, through the names Hugging Face gives things."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokentight.models.config import ModelConfig
from tokentight.models.errors import UnsupportedModelError
from tokentight.models.hf_config import model_config_from_hf

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_ROPE_SCALING_KEYS = frozenset(
    {
        "type",
        "factor",
        "original_context_length",
        "finetuned",
        "attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
    }
)


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
    facts = _Facts(metadata, gguf_architecture(metadata))
    parts = facts.integer("split.count", 1)
    if parts > 1:
        raise UnsupportedModelError(
            f"the GGUF file is one of {parts} parts; join them first with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    if facts.integer("{arch}.expert_count", 0):
        raise UnsupportedModelError(
            "the GGUF file holds a mixture of experts; only dense models are served"
        )
    if len(tensor_shapes.get("token_embd.weight", ())) != 2:
        raise UnsupportedModelError("the GGUF file holds no token_embd.weight: not a whole model")
    return model_config_from_hf(_hf_config(facts, tensor_shapes))


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


@dataclass(frozen=True, slots=True)
class _Facts:
    """Metadata by key, checked for its kind; `{arch}` in a key stands for the architecture.

    A key without a default must be there.
    """

    metadata: Mapping[str, Any]
    architecture: str

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._fault(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._fault(key, value, "a number")
        return float(value)

    def starting(self, prefix: str) -> dict[str, Any]:
        """What stands under `prefix`, by the rest of its key."""
        prefix = prefix.format(arch=self.architecture)
        found = (key for key in self.metadata if key.startswith(prefix))
        return {key.removeprefix(prefix): self.metadata[key] for key in found}

    def _value(self, key: str, default: float | None) -> Any:
        key = key.format(arch=self.architecture)
        if key not in self.metadata and default is None:
            raise UnsupportedModelError(f"the GGUF file does not state {key}")
        return self.metadata.get(key, default)

    def _fault(self, key: str, value: Any, kind: str) -> UnsupportedModelError:
        key = key.format(arch=self.architecture)
        if isinstance(value, list):
            return UnsupportedModelError(
                f"{key} of the GGUF file differs from layer to layer; only models whose layers "
                "are alike are served"
            )
        return UnsupportedModelError(f"{key} of the GGUF file is {value!r}; it must be {kind}")


def _hf_config(facts: _Facts, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    vocab_size, hidden_size = shapes["token_embd.weight"]
    num_heads = facts.integer("{arch}.attention.head_count")
    default_head_dim = hidden_size // max(1, num_heads)
    head_dim = facts.integer("{arch}.attention.key_length", default_head_dim)
    if facts.integer("{arch}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("attention values in the GGUF file are not as long as keys")
    rotated = facts.integer("{arch}.rope.dimension_count", head_dim)
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": facts.integer("{arch}.embedding_length"),
        "intermediate_size": facts.integer("{arch}.feed_forward_length"),
        "num_hidden_layers": facts.integer("{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": facts.integer("{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": facts.number("{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": facts.integer("{arch}.context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "partial_rotary_factor": rotated / head_dim if head_dim else 1.0,
        "rope_parameters": _rope_parameters(facts),
        **_token_ids(facts),
    }
    if facts.architecture != "llama":
        # Which layers a window covers is not recorded for Qwen, whose published models do not
        # use theirs; llama.cpp ignores it too.
        return {"architectures": [f"Qwen{facts.architecture[-1]}ForCausalLM"], **config}
    window = facts.integer("{arch}.attention.sliding_window", 0)
    if window:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window, **config}
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        **config,
    }


def _rope_parameters(facts: _Facts) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_theta": facts.number("{arch}.rope.freq_base", 10000.0)}
    scaling = facts.starting("{arch}.rope.scaling.")
    kind = scaling.get("type", "none")
    if kind == "none":
        # How files of 2023 wrote linear scaling.
        factor = facts.number("{arch}.rope.scale_linear", 1.0)
        return {**parameters, "rope_type": "linear" if factor != 1 else "default", "factor": factor}
    unknown = sorted(set(scaling) - _ROPE_SCALING_KEYS)
    if unknown or scaling.get("attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"RoPE scaling of the GGUF file uses {', '.join(unknown) or 'attn_factor'}, which is "
            f"not supported; known are {', '.join(sorted(_ROPE_SCALING_KEYS))}"
        )
    parameters |= {"rope_type": kind, "factor": facts.number("{arch}.rope.scaling.factor")}
    if kind == "yarn":
        original = "{arch}.rope.scaling.original_context_length"
        parameters["original_max_position_embeddings"] = facts.integer(original)
        for name in ("beta_fast", "beta_slow"):
            parameters[name] = facts.number(f"{{arch}}.rope.scaling.yarn_{name}", 0.0) or None
    return parameters


def _token_ids(facts: _Facts) -> dict[str, Any]:
    found = {}
    for name in ("bos", "eos", "eot"):
        key = f"tokenizer.ggml.{name}_token_id"
        found[name] = facts.integer(key) if key in facts.metadata else None
    ends = [token_id for token_id in (found["eos"], found["eot"]) if token_id is not None]
    return {"bos_token_id": found["bos"], "eos_token_id": ends}
