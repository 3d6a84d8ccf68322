"""Reading Hugging Face configurations, and RoPE tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CASES, tiny_model

from tokentight.models.config import ModelConfig
from tokentight.models.errors import UnsupportedModelError
from tokentight.models.rope import RopeConfig, rope_table

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN = {**PLAIN, "architectures": ["Qwen2ForCausalLM"]}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**PLAIN, **changes})


def config_of(model: Any, family: str) -> ModelConfig:
    saved = model.config.to_dict()
    return ModelConfig.from_hf({**saved, "architectures": [f"{family}ForCausalLM"]})


@pytest.mark.parametrize("case", CASES)
def test_rope_tables_equal_those_of_transformers(case: str) -> None:
    """Cosines and sines are transformers' but for its float32 angles."""
    family, overrides = CASES[case]
    model = tiny_model(family, **overrides)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(64)[None])
    config = ModelConfig.from_hf(
        {**model.config.to_dict(), "architectures": [f"{family}ForCausalLM"]}
    )
    table = rope_table(config.rope, config.heads.head_dim, 64)
    half = config.heads.head_dim // 2
    torch.testing.assert_close(table.cos, cos[0, :, :half], atol=2e-5, rtol=0)
    torch.testing.assert_close(table.sin, sin[0, :, :half], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "variant",
    [
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"attention_factor": 1.7},
        {"truncate": False},
        {"beta_fast": 16, "beta_slow": 2},
    ],
)
def test_yarn_variants_equal_those_of_transformers(variant: dict[str, Any]) -> None:
    rope = {**CASES["llama-yarn-rope"][1]["rope_parameters"], **variant}
    model = tiny_model("Llama", rope_parameters=rope)
    cos, _ = model.model.rotary_emb(torch.zeros(1), torch.arange(64)[None])
    config = config_of(model, "Llama")
    table = rope_table(config.rope, 16, 64)
    torch.testing.assert_close(table.cos, cos[0, :, :8], atol=2e-5, rtol=0)


def test_rope_table_does_not_depend_on_its_length() -> None:
    config = RopeConfig.from_hf({"rope_parameters": CASES["llama-yarn-rope"][1]["rope_parameters"]})
    short, long = rope_table(config, 32, 17), rope_table(config, 32, 4000)
    assert torch.equal(short.cos, long.cos[:17])
    assert torch.equal(short.sin, long.sin[:17])


def test_old_and_new_rope_spelling_are_one() -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    new = read(rope_parameters={**parameters, "rope_theta": 5e5})
    old = read(rope_scaling=parameters, rope_theta=5e5)
    older = read(rope_scaling={**parameters, "rope_type": None, "type": "yarn"}, rope_theta=5e5)
    assert new.rope == old.rope == older.rope
    assert new.rope.theta == 5e5
    assert new.rope.rope_type == "yarn"
    assert read(rope_scaling=None, rope_theta=7.0).rope == RopeConfig(theta=7.0)


def test_yarn_stretches_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(rope_scaling=scaling).context_length == 512
    assert read().context_length == 128


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None,) * 4),
        ({"use_sliding_window": False, "sliding_window": 8}, (None,) * 4),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_qwen_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert ModelConfig.from_hf({**QWEN, **changes}).layer_windows == windows


def test_mistral_windows() -> None:
    mistral = ["MistralForCausalLM"]
    assert read(architectures=mistral, sliding_window=16).layer_windows == (16,) * 4
    assert read(architectures=mistral, sliding_window=None).layer_windows == (None,) * 4
    assert read(architectures=mistral).layer_windows == (4096,) * 4


def test_end_tokens_of_generation_come_first_and_none_is_lost() -> None:
    config = {**PLAIN, "eos_token_id": 2}
    assert ModelConfig.from_hf(config).eos_token_ids == (2,)
    assert ModelConfig.from_hf(config, {"eos_token_id": [7, 2, 8]}).eos_token_ids == (7, 2, 8)
    assert ModelConfig.from_hf(PLAIN, {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel; supported are Llama",
        ),
        ({"architectures": None, "model_type": "bert"}, r"none \(model_type 'bert'\)"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; only 'silu'"),
        ({"vocab_size": None}, r"vocab_size in config\.json is None; it must be an integer"),
        ({"hidden_size": "64"}, r"hidden_size in config\.json is '64'"),
        ({"num_hidden_layers": 0}, r"num_layers is 0; it must be above 0"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, r"4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, r"head_dim is 15; .* even"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; only .*\(1\.0\)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, r"'dynamic' is not supported.*yarn"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"'linear' needs a factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"factor is 0"),
        ({"rope_theta": -1.0}, r"theta is -1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, r"needs low_freq_factor and high"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            r"high_freq_factor 4\.0 must be above low_freq_factor 4\.0",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"per layer type"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]},
            r"layer_types in a MistralForCausalLM",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, r"at least 1 position"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["chunked_attention"] * 4},
            r"holds chunked_attention; supported are full_attention",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]},
            r"1 layer types for 4 layers",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], said: str) -> None:
    """The message names the field, its value and what is supported."""
    with pytest.raises(UnsupportedModelError, match=said):
        read(**changes)
