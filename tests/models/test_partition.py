"""Splitting layers over stages."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokentight.kernels.interface import HeadShape
from tokentight.models.config import ModelConfig
from tokentight.models.partition import LayerRange, split_layers, whole_model
from tokentight.models.rope import RopeConfig


def config_of(num_layers: int, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=num_layers,
        heads=HeadShape(2, 1, 4),
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        max_position_embeddings=16,
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        layer_windows=(None,) * num_layers,
        eos_token_ids=(2,),
        bos_token_id=1,
        checkpoint_dtype="float32",
        weight_dtype=torch.float32,
    )


def worst_cost(config: ModelConfig, counts: tuple[int, ...]) -> int:
    layer = config.layer_matrix_parameters + config.layer_vector_parameters
    costs = [count * layer for count in counts]
    costs[-1] += config.vocab_size * config.hidden_size
    return max(costs)


@given(st.integers(1, 10), st.integers(1, 10), st.integers(1, 400))
def test_split_is_complete_and_no_split_is_better(
    num_layers: int, num_stages: int, vocab_size: int
) -> None:
    """Ranges join without a gap, and brute force over all splits finds none cheaper."""
    num_stages = min(num_stages, num_layers)
    config = config_of(num_layers, vocab_size)
    ranges = split_layers(config, num_stages)
    assert len(ranges) == num_stages
    assert [r.first for r in ranges] == [0, *(r.last for r in ranges[:-1])]
    assert ranges[-1].last == num_layers
    assert [r.has_embedding for r in ranges] == [i == 0 for i in range(num_stages)]
    assert [r.has_head for r in ranges] == [i == num_stages - 1 for i in range(num_stages)]
    counts = tuple(r.num_layers for r in ranges)
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    every = (tuple(b - a for a, b in itertools.pairwise((0, *cut, num_layers))) for cut in cuts)
    assert worst_cost(config, counts) == min(worst_cost(config, split) for split in every)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(ValueError, match=rf"pipeline_parallel_size is {num_stages}.*\[1, 3\]"):
        split_layers(config_of(3, 10), num_stages)


def test_stage_weights_add_up_to_the_model() -> None:
    """Bytes of the stages add up to the whole, plus the copy that a tied head off the first
    stage needs."""
    config = config_of(6, 50)
    whole = config.weight_bytes(whole_model(config))
    assert whole == config.num_parameters * 4
    copy = config.embedding_parameters * 4
    assert sum(map(config.weight_bytes, split_layers(config, 3))) == whole + copy
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    assert sum(map(untied.weight_bytes, split_layers(untied, 3))) == untied.num_parameters * 4


@pytest.mark.parametrize(
    ("first", "last", "has_embedding"), [(2, 2, False), (-1, 1, False), (0, 1, False), (1, 2, True)]
)
def test_impossible_ranges_are_refused(first: int, last: int, has_embedding: bool) -> None:
    with pytest.raises(ValueError, match=r"layers|embedding"):
        LayerRange(first, last, has_embedding, has_head=False)
