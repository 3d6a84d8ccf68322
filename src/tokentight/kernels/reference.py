"""The reference kernels: plain torch on any device, slower twin of the native ones.

torch picks other code, and so other bits, for other row counts. Here whatever reduces or takes an
exponential runs on tiles of one fixed shape, padded with zeros, so that a row always meets the same
code. That leaves its index in the tile, which `tokentight.kernels.selftest` checks on the machine.
Correctly rounded elementwise operations (add, multiply, divide, square root) need no tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokentight.kernels.interface import HeadShape, LayerKV, PackedMatrix, RopeTable, StepInputs
from tokentight.kernels.reference_attention import paged_attention


@dataclass(frozen=True, slots=True)
class ReferenceTiles:
    """`rows` per tile of every row-wise operation; `query_tiles` per batched attention product."""

    rows: int = 64
    query_tiles: int = 8

    def __post_init__(self) -> None:
        if self.rows < 1 or self.query_tiles < 1:
            raise ValueError(f"tiles are {self.rows} rows and {self.query_tiles} query tiles; >= 1")


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceMatrix:
    """The weight as it came, `[num_rows, num_cols]`; bfloat16 is widened per product."""

    data: Tensor

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]

    @property
    def num_cols(self) -> int:
        return self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceKV:
    """`keys` and `values`, float32 `[num_blocks * block_size, kv_heads, head_dim]`, by slot."""

    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class ReferenceKernels:
    """`Kernels` in plain torch. On the CPU it runs on torch's own threads, as many as they are."""

    def __init__(
        self, device: str | torch.device = "cpu", tiles: ReferenceTiles | None = None
    ) -> None:
        self._device = torch.device(device)
        self._tiles = tiles or ReferenceTiles()

    @property
    def name(self) -> str:
        return "reference"

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def tiles(self) -> ReferenceTiles:
        return self._tiles

    def pack(self, weight: Tensor) -> ReferenceMatrix:
        if weight.dim() != 2 or 0 in weight.shape or not _is_storage(weight.dtype):
            raise ValueError(
                f"weight is {weight.dtype} {list(weight.shape)}; a matrix must be float32 or "
                "bfloat16 with two non-empty dimensions: convert it first"
            )
        return ReferenceMatrix(weight.detach().to(self._device).contiguous())

    def allocate_kv(self, heads: HeadShape, num_blocks: int, block_size: int) -> ReferenceKV:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} positions; both must be >= 1")
        shape = (num_blocks * block_size, heads.num_kv_heads, heads.head_dim)
        return ReferenceKV(
            torch.zeros(shape, device=self._device), torch.zeros(shape, device=self._device)
        )

    def embed(self, table: PackedMatrix, token_ids: Tensor) -> Tensor:
        matrix = _matrix(table)
        if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < (
            matrix.num_rows
        ):
            raise ValueError(f"token_ids must lie in 0 to {matrix.num_rows - 1}: {token_ids}")
        return matrix.data[token_ids.long()].float()

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        matrix = _matrix(weight)
        _check_columns("x", x, matrix.num_cols)
        transposed = matrix.data.float().t()
        out = self._by_tiles(lambda tile: tile @ transposed, x, matrix.num_rows)
        return out if bias is None else out + bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check_columns("x", x, weight.shape[0])
        mean = self._by_tiles(lambda tile: (tile * tile).mean(-1, keepdim=True), x, 1)
        return x * (1.0 / torch.sqrt(mean + eps)) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        decay = self._by_tiles(lambda tile: torch.exp(-tile), gate, gate.shape[1])
        return gate / (1.0 + decay) * up

    def rope_and_cache(
        self,
        qkv: Tensor,
        step: StepInputs,
        kv: LayerKV,
        heads: HeadShape,
        rope: RopeTable,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        cache = _kv(kv)
        dim, tokens = heads.head_dim, step.num_tokens
        _check_columns("qkv", qkv, (heads.num_heads + 2 * heads.num_kv_heads) * dim)
        sizes = [heads.num_heads * dim, heads.num_kv_heads * dim, heads.num_kv_heads * dim]
        q, k, v = (part.reshape(tokens, -1, dim) for part in torch.split(qkv, sizes, dim=-1))
        if q_norm is not None:
            q = self.rms_norm(q.reshape(-1, dim), q_norm, eps).view(q.shape)
        if k_norm is not None:
            k = self.rms_norm(k.reshape(-1, dim), k_norm, eps).view(k.shape)
        positions = step.positions.long()
        cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
        slots = step.slots.long()
        cache.keys[slots] = _rotate(k, cos, sin)
        cache.values[slots] = v
        return _rotate(q, cos, sin).reshape(tokens, -1)

    def attention(
        self,
        q: Tensor,
        step: StepInputs,
        kv: LayerKV,
        heads: HeadShape,
        scale: float,
        window: int | None,
    ) -> Tensor:
        cache = _kv(kv)
        if window is not None and window < 1:
            raise ValueError(f"window is {window}; give at least 1, or None for no window")
        return paged_attention(
            q, step, cache.keys, cache.values, heads, scale, window, self._tiles.query_tiles
        )

    def argmax(self, logits: Tensor) -> Tensor:
        return torch.where(logits.isnan(), float("-inf"), logits).argmax(dim=-1)

    def logsumexp(self, logits: Tensor) -> Tensor:
        rows = [torch.logsumexp(row.clone(), dim=-1, keepdim=True) for row in logits]
        return torch.cat(rows) if rows else logits.new_empty((0,))

    def softmax(self, logits: Tensor) -> Tensor:
        rows = [torch.softmax(row.clone(), dim=-1) for row in logits]
        return torch.stack(rows) if rows else logits.clone()

    def _by_tiles(self, operation: Callable[[Tensor], Tensor], x: Tensor, columns: int) -> Tensor:
        """`operation` on tiles of exactly `tiles.rows` rows, each in memory of its own."""
        rows = self._tiles.rows
        out = torch.empty((x.shape[0], columns), device=x.device)
        for start in range(0, x.shape[0], rows):
            part = x[start : start + rows]
            tile = x.new_zeros((rows, x.shape[1]))
            tile[: part.shape[0]] = part
            out[start : start + rows] = operation(tile)[: part.shape[0]]
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _is_storage(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.bfloat16)


def _check_columns(name: str, x: Tensor, columns: int) -> None:
    if x.dim() != 2 or x.shape[1] != columns or x.dtype != torch.float32:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)}; it must be float32 with {columns} columns"
        )


def _matrix(matrix: PackedMatrix) -> ReferenceMatrix:
    if not isinstance(matrix, ReferenceMatrix):
        raise TypeError(f"the weight is a {type(matrix).__name__}; pack it with these kernels")
    return matrix


def _kv(kv: LayerKV) -> ReferenceKV:
    if not isinstance(kv, ReferenceKV):
        raise TypeError(f"the KV is a {type(kv).__name__}; allocate it with these kernels")
    return kv
