"""A model that does not fit is refused at start, with the sizes and what would fit."""

from __future__ import annotations

import pytest
import torch

from tokentight.engine.config import ConfigError, EngineConfig
from tokentight.engine.memory import KV_SHARE, plan_memory
from tokentight.models.config import ModelConfig
from tokentight.models.partition import split_layers

MODEL = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    },
    None,
)
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4  # layers x (K, V) x kv heads x head_dim x float32
WEIGHTS = MODEL.weight_bytes(split_layers(MODEL, 1)[0])


def plan(available: int, **settings: object) -> object:
    config = EngineConfig(model="m", **settings)  # type: ignore[arg-type]
    return plan_memory(config, MODEL, split_layers(MODEL, 1), available)


def test_kv_takes_its_share_of_what_the_weights_leave() -> None:
    left = 100 * 2**20
    planned = plan(WEIGHTS + left)
    assert MODEL.weight_dtype == torch.float32
    assert planned.num_blocks == int(left * KV_SHARE) // (16 * TOKEN_BYTES)
    assert planned.kv_bytes == planned.num_blocks * 16 * TOKEN_BYTES
    assert planned.max_model_len == 512


def test_no_more_kv_is_taken_than_all_requests_could_fill() -> None:
    planned = plan(WEIGHTS + 10 * 2**30, max_num_seqs=2)
    assert planned.num_blocks == 2 * 512 // 16


def test_stages_that_copy_a_tied_embedding_are_counted() -> None:
    config = EngineConfig(model="m", pipeline_parallel_size=2, kv_cache_memory=2**20)
    stages = split_layers(MODEL, 2)
    planned = plan_memory(config, MODEL, stages, 2**30)
    assert planned.weight_bytes == sum(MODEL.weight_bytes(stage) for stage in stages)


@pytest.mark.parametrize(
    ("available", "settings", "said"),
    [
        (WEIGHTS - 1, {}, "the weights take"),
        (WEIGHTS + 2**20, {"kv_cache_memory": 2**21}, "free beside the weights"),
        (WEIGHTS + 2**30, {"kv_cache_memory": 2**16}, "lower --max-model-len or raise"),
        (WEIGHTS + 2**30, {"max_model_len": 513}, "the model is made for 512"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(
    available: int, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(available, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block_size": 24}, "block_size is 24; it must be a multiple of 16"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"kv_cache_memory": 0}, "kv_cache_memory is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(model="m", **settings)  # type: ignore[arg-type]
