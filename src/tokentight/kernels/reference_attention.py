"""Paged attention in plain torch, in products of one fixed shape.

A query tile holds the tokens of one row at positions `n * QUERY_TILE ..`, each at its position's
index in the tile, so chunking cannot move it. KV is walked in tiles of `KV_TILE` absolute positions
with an online softmax; a KV tile in which a token sees nothing leaves its state as it was, so
neither the context of others in the batch nor where the walk starts and ends can touch it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokentight.kernels.interface import HeadShape, StepInputs

QUERY_TILE = 8
KV_TILE = 64


@dataclass(frozen=True, slots=True)
class _QueryTiles:
    """`N` query tiles: `rows` [N], the positions of their tokens `[N, QUERY_TILE]`, and the place
    of each of the step's tokens among the `N * QUERY_TILE`, `[T]`."""

    rows: Tensor
    positions: Tensor
    token_places: Tensor


def paged_attention(
    q: Tensor,
    step: StepInputs,
    keys: Tensor,
    values: Tensor,
    heads: HeadShape,
    scale: float,
    window: int | None,
    batch: int,
) -> Tensor:
    """Attention of `q` `[T, Hq * D]` over `keys` and `values` `[slots, Hkv, D]`: `[T, Hq * D]`.

    `batch` query tiles go into one product, the last batch padded with empty ones.
    """
    num_tokens, device = step.num_tokens, q.device
    if num_tokens == 0:
        return torch.empty_like(q)
    tiles = _query_tiles(step, batch)
    kv_heads, dim = heads.num_kv_heads, heads.head_dim
    group = heads.num_heads // kv_heads
    count = tiles.rows.shape[0]
    padded = torch.zeros((count * QUERY_TILE, heads.num_heads * dim), device=device)
    padded[tiles.token_places] = q
    grouped = padded.view(count, QUERY_TILE, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(count, kv_heads, group * QUERY_TILE, dim)
    out = torch.empty_like(grouped)
    for start in range(0, count, batch):
        part = slice(start, start + batch)
        out[part] = _attend(
            grouped[part].clone(),
            tiles.positions[part],
            tiles.rows[part],
            step,
            keys,
            values,
            scale,
            window,
        )
    out = out.view(count, kv_heads, group, QUERY_TILE, dim).permute(0, 3, 1, 2, 4)
    # A masked product may contribute either zero, so a result of zero gets one sign.
    return out.reshape(count * QUERY_TILE, -1)[tiles.token_places] + 0.0


def _query_tiles(step: StepInputs, batch: int) -> _QueryTiles:
    """Padding tiles have row -1."""
    starts, lengths = step.query_starts.tolist(), step.context_lens.tolist()
    tiles: list[tuple[int, int]] = []
    first_tile_of_row: list[int] = []
    for row, length in enumerate(lengths):
        new = starts[row + 1] - starts[row]
        first = (length - new) // QUERY_TILE
        first_tile_of_row.append(len(tiles) - first)
        if new:
            tiles += [(row, index) for index in range(first, (length - 1) // QUERY_TILE + 1)]
    tiles += [(-1, 0)] * (-len(tiles) % batch)
    device = step.positions.device
    layout = torch.tensor(tiles, device=device)
    positions = layout[:, 1:] * QUERY_TILE + torch.arange(QUERY_TILE, device=device)
    per_row = step.query_starts[1:] - step.query_starts[:-1]
    bases = torch.tensor(first_tile_of_row, device=device).repeat_interleave(per_row.long())
    places = bases * QUERY_TILE + step.positions
    return _QueryTiles(layout[:, 0], positions, places)


def _attend(
    q: Tensor,
    positions: Tensor,
    rows: Tensor,
    step: StepInputs,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """One batch: `q` `[B, Hkv, G * QUERY_TILE, D]`, `positions` `[B, QUERY_TILE]`, `rows` `[B]`."""
    batch, kv_heads, per_tile = q.shape[:3]
    device = q.device
    known = rows >= 0
    tables = step.block_tables[rows.clamp(min=0)].long()
    lengths = torch.where(known, step.context_lens[rows.clamp(min=0)], 0).long()
    positions = torch.where(known[:, None], positions, -1)
    earliest = _earliest(step, rows, known, lengths, window)
    top = torch.full((batch, kv_heads, per_tile, 1), float("-inf"), device=device)
    total = torch.zeros_like(top)
    acc = torch.zeros_like(q)
    seen = torch.minimum(positions.amax(dim=1) + 1, lengths)
    first = int(torch.where(known, earliest, int(lengths.max())).min()) // KV_TILE * KV_TILE
    for base in range(first, int(seen.max()), KV_TILE):
        at = base + torch.arange(KV_TILE, device=device)
        # Other slots may hold anything, and 0 * NaN is not 0: they are read as zeros.
        held = (at >= earliest[:, None]) & (at < lengths[:, None])
        blocks = tables.gather(
            1, (at // step.block_size).clamp(max=tables.shape[1] - 1).expand(batch, -1)
        )
        slots = torch.where(held, blocks * step.block_size + at % step.block_size, 0)
        mask = held[:, :, None, None]
        k = torch.where(mask, keys[slots], 0.0).permute(0, 2, 3, 1)
        v = torch.where(mask, values[slots], 0.0).permute(0, 2, 1, 3)
        visible = held[:, None, :] & (at <= positions[:, :, None])
        if window is not None:
            visible &= at > positions[:, :, None] - window
        # [B, 1, G * QUERY_TILE, KV_TILE]: query rows run head by head within the tile.
        visible = visible.repeat(1, per_tile // QUERY_TILE, 1)[:, None]
        scores = torch.matmul(q, k.contiguous()) * scale
        scores = torch.where(visible, scores, float("-inf"))
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        fade = torch.exp(top - new_top)
        weights = torch.exp(scores - new_top)
        touched = visible.any(dim=-1, keepdim=True)
        total = torch.where(touched, total * fade + weights.sum(dim=-1, keepdim=True), total)
        acc = torch.where(touched, acc * fade + torch.matmul(weights, v.contiguous()), acc)
        top = torch.where(touched, new_top, top)
    return acc / total


def _earliest(
    step: StepInputs, rows: Tensor, known: Tensor, lengths: Tensor, window: int | None
) -> Tensor:
    """The first position that any token of each tile's row may see, `[B]`."""
    if window is None:
        return torch.zeros_like(lengths)
    per_row = step.query_starts[1:] - step.query_starts[:-1]
    new = torch.where(known, per_row[rows.clamp(min=0)], 0)
    return (lengths - new - window + 1).clamp(min=0)
