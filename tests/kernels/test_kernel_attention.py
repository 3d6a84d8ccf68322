"""Paged attention: right against float64, independent of chunks, company, blocks and threads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    AttentionCase,
    assert_same_bits,
    attention_oracle,
    load,
    native,
    run_attention,
)

from tokentight.kernels.interface import HeadShape, StepInputs

NAMES = ["native", "reference"]
HEADS = (
    HeadShape(9, 3, 64),
    HeadShape(4, 4, 8),
    HeadShape(7, 1, 24),
    HeadShape(2, 2, 128),
    HeadShape(50, 1, 16),
    HeadShape(4, 2, 80),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 21])
@pytest.mark.parametrize("with_norms", [False, True])
def test_attention_is_close_to_float64(
    name: str, heads: HeadShape, window: int | None, with_norms: bool
) -> None:
    """Within 5e-6 of dense attention, for outputs of about 1."""
    case = AttentionCase(heads, (40, 17, 70), window, with_norms)
    outputs = run_attention(load(name), case, [[(0, 40), (1, 16), (2, 37)], [(1, 1), (2, 33)]])
    for request, out in outputs.items():
        torch.testing.assert_close(out.double(), attention_oracle(case, request), rtol=0, atol=5e-6)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[AttentionCase, list[list[tuple[int, int]]]]:
    lengths = tuple(draw(st.lists(st.integers(1, 75), min_size=1, max_size=4)))
    case = AttentionCase(
        draw(st.sampled_from(HEADS[:5])),
        lengths,
        draw(st.sampled_from([None, 1, 5, 16, 40])),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )
    left = list(lengths)
    steps: list[list[tuple[int, int]]] = []
    while any(left):
        waiting = [r for r, count in enumerate(left) if count]
        rows = draw(st.permutations(waiting))[: draw(st.integers(1, len(waiting)))]
        step = []
        for r in rows:
            count = draw(st.one_of(st.just(left[r]), st.integers(1, left[r])))
            step.append((r, count))
            left[r] -= count
        steps.append(step)
        if len(steps) == 6:
            steps += [[(r, count)] for r, count in enumerate(left) if count]
            break
    return case, steps


@pytest.mark.parametrize("name", NAMES)
@given(
    workload=workloads(),
    threads=st.integers(1, 3),
    block_size=st.sampled_from([16, 32, 48]),
    table_seed=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_a_tokens_attention_does_not_depend_on_load(
    name: str,
    workload: tuple[AttentionCase, list[list[tuple[int, int]]]],
    threads: int,
    block_size: int,
    table_seed: int,
) -> None:
    """Chunks, company, row order, blocks and threads as drawn; alone and in one go otherwise."""
    case, steps = workload
    kernels = native(threads) if name == "native" else load(name)
    loaded = run_attention(kernels, case, steps, block_size, table_seed)
    for request, length in enumerate(case.lengths):
        alone = run_attention(load(name), case, [[(request, length)]])
        assert_same_bits(loaded[request], alone[request])


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_portable_build_gives_the_bits_of_avx2(heads: HeadShape, window: int | None) -> None:
    case = AttentionCase(heads, (33, 20), window, with_norms=True)
    steps = [[(0, 30), (1, 5)], [(1, 15), (0, 3)]]
    fast = run_attention(native(), case, steps)
    portable = run_attention(native(1, portable=True), case, steps)
    for request in fast:
        assert_same_bits(portable[request], fast[request])


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_native_and_reference_agree_to_5e_6(heads: HeadShape) -> None:
    case = AttentionCase(heads, (70,), None, with_norms=True)
    steps = [[(0, 70)]]
    first, second = (run_attention(load(name), case, steps)[0] for name in NAMES)
    torch.testing.assert_close(first, second, rtol=0, atol=5e-6)


def test_inconsistent_steps_are_refused() -> None:
    """Positions, blocks and slots come from elsewhere; C must never follow a wrong one."""
    kernels, heads = native(), HeadShape(2, 1, 16)
    kv = kernels.allocate_kv(heads, 4, 16)
    step = StepInputs(
        token_ids=torch.zeros(2, dtype=torch.int32),
        positions=torch.tensor([3, 4], dtype=torch.int32),
        slots=torch.tensor([3, 4]),
        query_starts=torch.tensor([0, 2], dtype=torch.int32),
        context_lens=torch.tensor([5], dtype=torch.int32),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        block_size=16,
    )
    q = torch.randn(2, 32)
    kernels.attention(q, step, kv, heads, 0.25, None)

    def refused(**changes: object) -> None:
        wrong = dataclasses.replace(step, **changes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"row 0 of the step is inconsistent|block_size"):
            kernels.attention(q, wrong, kv, heads, 0.25, None)

    refused(positions=torch.tensor([3, 5], dtype=torch.int32))
    refused(context_lens=torch.tensor([6], dtype=torch.int32))
    refused(block_tables=torch.full((1, 1), 4, dtype=torch.int32))
    refused(block_tables=torch.full((1, 1), -1, dtype=torch.int32))
    refused(query_starts=torch.tensor([0, 3], dtype=torch.int32))
    refused(block_size=32)
    with pytest.raises(ValueError, match="window is 0"):
        kernels.attention(q, step, kv, heads, 0.25, 0)


def test_impossible_kv_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 8"):
        native().allocate_kv(HeadShape(2, 1, 16), 4, 8)
    with pytest.raises(ValueError, match="head_dim is 20"):
        native().allocate_kv(HeadShape(2, 1, 20), 4, 16)
