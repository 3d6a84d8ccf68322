"""Kernels to test and paged-attention workloads to run on them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tokentight.kernels.errors import NativeUnavailable
from tokentight.kernels.interface import HeadShape, Kernels, RopeTable, StepInputs
from tokentight.kernels.native import NativeKernels
from tokentight.kernels.reference import ReferenceKernels, ReferenceTiles

ROPE_POSITIONS = 160
EPS = 1e-6


@functools.cache
def native(num_threads: int = 1, portable: bool = False) -> NativeKernels:
    """Native kernels; without a compiler the test is skipped, except under CI, where it fails."""
    try:
        return NativeKernels(num_threads, extra_flags=("-DTT_PORTABLE",) if portable else ())
    except NativeUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"native kernels unavailable: {error}")


@functools.cache
def reference(rows: int = 16, query_tiles: int = 4) -> ReferenceKernels:
    return ReferenceKernels("cpu", ReferenceTiles(rows, query_tiles))


def load(name: str) -> Kernels:
    return reference() if name == "reference" else native()


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    same = torch.equal(
        actual.contiguous().view(torch.int32), expected.contiguous().view(torch.int32)
    )
    assert same, f"differs by up to {(actual - expected).abs().max()}"


def rope_table(dim: int) -> RopeTable:
    frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
    angles = torch.outer(torch.arange(ROPE_POSITIONS, dtype=torch.float64), frequencies)
    return RopeTable(angles.cos().float(), angles.sin().float())


@dataclass(frozen=True)
class AttentionCase:
    """One layer's attention over a few requests whose qkv follow from `seed` and their index."""

    heads: HeadShape
    lengths: tuple[int, ...]
    window: int | None = None
    with_norms: bool = False
    seed: int = 0

    def qkv(self, request: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + request)
        columns = (self.heads.num_heads + 2 * self.heads.num_kv_heads) * self.heads.head_dim
        return torch.randn((self.lengths[request], columns), generator=generator)

    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.with_norms:
            return None, None
        both = torch.rand((2, self.heads.head_dim), generator=torch.Generator().manual_seed(7))
        return both[0] + 0.5, both[1] + 0.5


def run_attention(
    kernels: Kernels,
    case: AttentionCase,
    steps: Sequence[Sequence[tuple[int, int]]],
    block_size: int = 16,
    table_seed: int = 0,
) -> dict[int, Tensor]:
    """Outputs `[length, Hq * D]` per request.

    A step lists `(request, number of tokens)` in batch order. Blocks lie in random order and
    every KV slot starts as NaN.
    """
    requests = sorted({request for step in steps for request, _ in step})
    width = -(-max(case.lengths) // block_size) + 1
    generator = torch.Generator().manual_seed(table_seed)
    num_blocks = len(case.lengths) * width + 2
    blocks = torch.randperm(num_blocks, generator=generator)[: len(case.lengths) * width]
    tables = blocks.view(len(case.lengths), width).int()
    kv = kernels.allocate_kv(case.heads, num_blocks, block_size)
    kv.keys.fill_(math.nan)  # type: ignore[attr-defined]
    kv.values.fill_(math.nan)  # type: ignore[attr-defined]
    rope, inputs = rope_table(case.heads.head_dim), {r: case.qkv(r) for r in requests}
    done = dict.fromkeys(requests, 0)
    outputs: dict[int, list[Tensor]] = {r: [] for r in requests}
    for step in steps:
        spans = [(r, done[r], done[r] + count) for r, count in step]
        used = tables[[r for r, _, _ in spans]].clone()
        for row, (_, _, end) in enumerate(spans):
            used[row, -(-end // block_size) :] = 0
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        owners = torch.cat([torch.full((end - start,), r) for r, start, end in spans])
        slots = tables[owners, positions // block_size].long() * block_size
        counts = [end - start for _, start, end in spans]
        inputs_of_step = StepInputs(
            token_ids=positions.int(),
            positions=positions.int(),
            slots=slots + positions % block_size,
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            block_tables=used,
            block_size=block_size,
        )
        qkv = torch.cat([inputs[r][start:end] for r, start, end in spans])
        q = kernels.rope_and_cache(qkv, inputs_of_step, kv, case.heads, rope, *case.norms(), EPS)
        scale = case.heads.head_dim**-0.5
        out = kernels.attention(q, inputs_of_step, kv, case.heads, scale, case.window)
        for (r, _, end), part in zip(spans, torch.split(out, counts), strict=True):
            outputs[r].append(part)
            done[r] = end
    return {r: torch.cat(parts) for r, parts in outputs.items()}


def attention_oracle(case: AttentionCase, request: int) -> Tensor:
    """Dense attention in float64."""
    heads, length = case.heads, case.lengths[request]
    dim, group = heads.head_dim, heads.num_heads // heads.num_kv_heads
    parts = case.qkv(request).double().view(length, -1, dim)
    q, k, v = torch.split(parts, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    rope = rope_table(dim)
    cos, sin = rope.cos[:length, None].double(), rope.sin[:length, None].double()

    def normed_and_rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    q_norm, k_norm = case.norms()
    q = normed_and_rotated(q, q_norm)
    k = normed_and_rotated(k, k_norm).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    index = torch.arange(length)
    hidden = index[None] > index[:, None]
    if case.window is not None:
        hidden |= index[None] <= index[:, None] - case.window
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, dim=1)).reshape(
        length, -1
    )
