"""The one interface between the model code and the arithmetic.

Every operation is *row-invariant*: the bits of an output row depend on that row's inputs alone,
never on how many rows there are, which other rows stand beside it, or how many threads run. The
promise of the whole engine rests on this.

Activations are float32 everywhere. `T` counts tokens of the step, `R` rows (requests), `V` the
vocabulary, `H` the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class PackedMatrix(Protocol):
    """A weight matrix `[num_rows, num_cols]` (out, in) in whatever layout the kernels read best."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_cols(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class LayerKV(Protocol):
    """One layer's paged keys and values, zero-filled when allocated. Layout is the kernels' own."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What kernels need to know of a step plan, as tensors on the kernels' device.

    Tokens stand row by row, positions ascending by one within a row. `context_lens[r]` counts the
    positions of row `r` that the KV holds once this step's tokens are written, so the last token
    of row `r` has position `context_lens[r] - 1`. `block_tables[r, p // block_size]` is the block
    that holds position `p`; entries past a row's last block are 0 and are never read.
    """

    token_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int64 [T]: block * block_size + offset in the block, where this token's KV goes
    query_starts: Tensor  # int32 [R + 1]: tokens of row r are query_starts[r]:query_starts[r + 1]
    context_lens: Tensor  # int32 [R]
    block_tables: Tensor  # int32 [R, W]
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention heads of one layer. `num_heads` is a multiple of `num_kv_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines, float32 `[max_positions, head_dim // 2]`, of the half-split ("neox") RoPE:

    out[i] = x[i] * cos - x[i + half] * sin;  out[i + half] = x[i + half] * cos + x[i] * sin.
    """

    cos: Tensor
    sin: Tensor


class Kernels(Protocol):
    """The arithmetic of a decoder stage. Implementations: `reference` (torch), `native` (C)."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def pack(self, weight: Tensor) -> PackedMatrix:
        """Lay out `weight` (`[out, in]`, float32 or bfloat16; that dtype stays in memory)."""
        ...

    def allocate_kv(self, heads: HeadShape, num_blocks: int, block_size: int) -> LayerKV:
        """Zero-filled keys and values for `num_blocks` blocks of `block_size` positions."""
        ...

    def embed(self, table: PackedMatrix, token_ids: Tensor) -> Tensor:
        """Rows `token_ids` (int32 `[T]`) of `table`, widened to float32 `[T, H]`."""
        ...

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T (+ bias)`: float32 `[T, in]` to `[T, out]`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight`, row by row, `[T, H]`."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then `rms_norm(residual)` as a new tensor."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up` `[T, 2 * I]` holding gate then up; returns `[T, I]`."""
        ...

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
        """Split `qkv` `[T, (Hq + 2 Hkv) * D]` (q, k, v in that order), apply the optional per-head
        RMSNorm to q and k (Qwen3) and RoPE at `step.positions`, write k and v to `step.slots`,
        and return the rotated q `[T, Hq * D]`."""
        ...

    def attention(
        self,
        q: Tensor,
        step: StepInputs,
        kv: LayerKV,
        heads: HeadShape,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Causal attention of each token over its row's positions `0..position` (or the last
        `window` of them, itself included), read through the block table: `[T, Hq * D]`."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """Index of each row's largest logit, the lowest index on ties: int64 `[L]`."""
        ...

    def logsumexp(self, logits: Tensor) -> Tensor:
        """`log(sum(exp(logits)))` row by row: float32 `[L]`."""
        ...

    def softmax(self, logits: Tensor) -> Tensor:
        """Row-wise softmax, float32 `[L, V]`. A logit of -inf has probability exactly 0."""
        ...
