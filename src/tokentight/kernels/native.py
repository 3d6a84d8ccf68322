"""The native kernels: C compiled on this machine, called with pointers.

One output of a matrix product is one chain of fused multiply-adds, attention walks the KV in tiles
at absolute positions, and every row-wise operation treats each row by itself: the bits of a row
depend on that row's inputs alone, whatever the row count, the company or the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokentight.kernels.compile import native_library
from tokentight.kernels.interface import HeadShape, LayerKV, PackedMatrix, RopeTable, StepInputs
from tokentight.kernels.library import ThreadPool, load_library

PANEL_ROWS = 16
KV_TILE = 16
MAX_HEAD_DIM = 512
_ALIGNMENT = 64
_HUGE_FROM = 2 << 20
_CPU = torch.device("cpu")
_F32, _BF16, _I32, _I64 = torch.float32, torch.bfloat16, torch.int32, torch.int64


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """`[num_rows, num_cols]` as panels of 16 rows: `data` `[ceil(num_rows / 16), num_cols, 16]`."""

    num_rows: int
    num_cols: int
    data: Tensor
    address: int
    is_bf16: bool

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class NativeKV:
    """`keys` `[blocks, kv_heads, block_size / 16, head_dim, 16]`,
    `values` `[blocks, kv_heads, block_size, head_dim]`, float32."""

    keys: Tensor
    values: Tensor
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class NativeKernels:
    """`Kernels` in C on the CPU. Calls from several Python threads take turns."""

    def __init__(
        self,
        num_threads: int,
        cpus: Sequence[int] | None = None,
        extra_flags: Sequence[str] = (),
    ) -> None:
        """Compile or load the library and start the threads.

        `cpus` pins each thread but the first, the caller's, to its CPU. `extra_flags` go to the
        compiler (`-DTT_PORTABLE`: no intrinsics). Raises `NativeUnavailable`, `ValueError`.
        """
        self._lib = load_library(native_library(extra_flags))
        self._pool = ThreadPool(self._lib, num_threads, cpus)

    @property
    def name(self) -> str:
        return "native"

    @property
    def device(self) -> torch.device:
        return _CPU

    @property
    def num_threads(self) -> int:
        return self._pool.num_threads

    def close(self) -> None:
        """End the threads. Later calls raise `RuntimeError`."""
        self._pool.close()

    def pack(self, weight: Tensor) -> NativeMatrix:
        if weight.dim() != 2 or 0 in weight.shape or weight.dtype not in (_F32, _BF16):
            raise ValueError(
                f"weight is {weight.dtype} {list(weight.shape)}; a matrix must be float32 or "
                "bfloat16 with two non-empty dimensions: convert it first"
            )
        source = weight.detach().to(_CPU).contiguous()
        rows, cols = source.shape
        panels = -(-rows // PANEL_ROWS)
        data = self._allocate((panels, cols, PANEL_ROWS), source.dtype)
        is_bf16 = source.dtype == _BF16
        self._lib.tt_pack(
            self._pool.handle, source.data_ptr(), data.data_ptr(), rows, cols, is_bf16
        )
        return NativeMatrix(rows, cols, data, data.data_ptr(), is_bf16)

    def allocate_kv(self, heads: HeadShape, num_blocks: int, block_size: int) -> NativeKV:
        if block_size <= 0 or block_size % KV_TILE:
            raise ValueError(
                f"block_size is {block_size}; the native kernels need a multiple of {KV_TILE}"
            )
        if num_blocks <= 0:
            raise ValueError(f"num_blocks is {num_blocks}; give at least 1")
        dim = heads.head_dim
        if dim % 8 or not 0 < dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim is {dim}; the native kernels need a multiple of 8 up to "
                f"{MAX_HEAD_DIM}: choose the reference kernels for this model"
            )
        shape = (num_blocks, heads.num_kv_heads)
        return NativeKV(
            self._allocate((*shape, block_size // KV_TILE, dim, KV_TILE), _F32),
            self._allocate((*shape, block_size, dim), _F32),
            num_blocks,
            block_size,
            heads.num_kv_heads,
            dim,
        )

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros, starting on a cache line, in huge pages where the system gives them.

        The zeros are the system's own: memory is taken when it is first written, so KV blocks
        cost nothing until they are used.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        room = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
        if room.nbytes >= _HUGE_FROM:
            self._lib.tt_prefer_huge_pages(room.data_ptr(), room.nbytes)
        skip = -room.data_ptr() % _ALIGNMENT
        return room[skip : skip + num_bytes].view(dtype).view(shape)

    def embed(self, table: PackedMatrix, token_ids: Tensor) -> Tensor:
        matrix = _matrix(table)
        _check("token_ids", token_ids, _I32, 1)
        count = token_ids.shape[0]
        out = torch.empty((count, matrix.num_cols), dtype=_F32)
        bad = self._lib.tt_embed(
            self._pool.handle,
            matrix.address,
            token_ids.data_ptr(),
            out.data_ptr(),
            count,
            matrix.num_rows,
            matrix.num_cols,
            matrix.is_bf16,
        )
        if bad >= 0:
            raise ValueError(
                f"token_ids[{bad}] is {int(token_ids[bad])}; the table has ids 0 to "
                f"{matrix.num_rows - 1}"
            )
        return out

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        matrix = _matrix(weight)
        _check("x", x, _F32, 2, matrix.num_cols)
        bias_address = None
        if bias is not None:
            _check("bias", bias, _F32, 1, matrix.num_rows)
            bias_address = bias.data_ptr()
        out = torch.empty((x.shape[0], matrix.num_rows), dtype=_F32)
        self._lib.tt_linear(
            self._pool.handle,
            x.data_ptr(),
            matrix.address,
            bias_address,
            out.data_ptr(),
            x.shape[0],
            matrix.num_rows,
            matrix.num_cols,
            matrix.is_bf16,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check("x", x, _F32, 2)
        rows, size = x.shape
        _check("weight", weight, _F32, 1, size)
        out = torch.empty((rows, size), dtype=_F32)
        self._lib.tt_rms_norm(
            self._pool.handle, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, eps
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check("x", x, _F32, 2)
        rows, size = x.shape
        _check("residual", residual, _F32, 2, size)
        _check("weight", weight, _F32, 1, size)
        if residual.shape[0] != rows:
            raise ValueError(f"residual has {residual.shape[0]} rows and x has {rows}")
        out = torch.empty((rows, size), dtype=_F32)
        self._lib.tt_add_rms_norm(
            self._pool.handle,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            eps,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        _check("gate_up", gate_up, _F32, 2)
        rows, size = gate_up.shape
        if size % 2:
            raise ValueError(f"gate_up has {size} columns; gate then up make an even number")
        out = torch.empty((rows, size // 2), dtype=_F32)
        self._lib.tt_silu_mul(
            self._pool.handle, gate_up.data_ptr(), out.data_ptr(), rows, size // 2
        )
        return out

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
        cache = _kv(kv, heads, step.block_size)
        dim, tokens = heads.head_dim, step.num_tokens
        _check("qkv", qkv, _F32, 2, (heads.num_heads + 2 * heads.num_kv_heads) * dim)
        _check("positions", step.positions, _I32, 1, tokens)
        _check("slots", step.slots, _I64, 1, tokens)
        _check("rope.cos", rope.cos, _F32, 2, dim // 2)
        _check("rope.sin", rope.sin, _F32, 2, dim // 2)
        if qkv.shape[0] != tokens or rope.cos.shape[0] != rope.sin.shape[0]:
            raise ValueError(
                f"qkv has {qkv.shape[0]} rows for {tokens} tokens; rope.cos and rope.sin have "
                f"{rope.cos.shape[0]} and {rope.sin.shape[0]} positions: each pair must agree"
            )
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                _check(name, norm, _F32, 1, dim)
        out = torch.empty((tokens, heads.num_heads * dim), dtype=_F32)
        bad = self._lib.tt_rope_and_cache(
            self._pool.handle,
            qkv.data_ptr(),
            step.positions.data_ptr(),
            step.slots.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            out.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            tokens,
            heads.num_heads,
            heads.num_kv_heads,
            dim,
            cache.block_size,
            cache.num_blocks,
            rope.cos.shape[0],
            eps,
        )
        if bad >= 0:
            raise ValueError(
                f"token {bad} has position {int(step.positions[bad])} and slot "
                f"{int(step.slots[bad])}; positions must lie below {rope.cos.shape[0]} and slots "
                f"below {cache.num_blocks * cache.block_size}"
            )
        return out

    def attention(
        self,
        q: Tensor,
        step: StepInputs,
        kv: LayerKV,
        heads: HeadShape,
        scale: float,
        window: int | None,
    ) -> Tensor:
        cache = _kv(kv, heads, step.block_size)
        tokens, rows = step.num_tokens, step.num_rows
        _check("q", q, _F32, 2, heads.num_heads * heads.head_dim)
        _check("positions", step.positions, _I32, 1, tokens)
        _check("query_starts", step.query_starts, _I32, 1, rows + 1)
        _check("context_lens", step.context_lens, _I32, 1)
        _check("block_tables", step.block_tables, _I32, 2)
        if window is not None and window < 1:
            raise ValueError(f"window is {window}; give at least 1, or None for no window")
        if q.shape[0] != tokens or step.block_tables.shape[0] != rows:
            raise ValueError(
                f"q has {q.shape[0]} rows for {tokens} tokens; block_tables has "
                f"{step.block_tables.shape[0]} rows for {rows} requests: each pair must agree"
            )
        out = torch.empty((tokens, heads.num_heads * heads.head_dim), dtype=_F32)
        bad = self._lib.tt_attention(
            self._pool.handle,
            q.data_ptr(),
            step.positions.data_ptr(),
            step.query_starts.data_ptr(),
            step.context_lens.data_ptr(),
            step.block_tables.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            out.data_ptr(),
            tokens,
            rows,
            step.block_tables.shape[1],
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            cache.block_size,
            cache.num_blocks,
            window or 0,
            scale,
        )
        if bad == -2:
            raise MemoryError("no memory for the attention's list of work items")
        if bad >= 0:
            raise ValueError(
                f"row {bad} of the step is inconsistent: its positions must end at context_lens - "
                f"1 and its blocks must lie in 0 to {cache.num_blocks - 1}"
            )
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        _check("logits", logits, _F32, 2)
        rows, size = logits.shape
        out = torch.empty((rows,), dtype=_I64)
        self._lib.tt_argmax(self._pool.handle, logits.data_ptr(), out.data_ptr(), rows, size)
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        _check("logits", logits, _F32, 2)
        rows, size = logits.shape
        out = torch.empty((rows,), dtype=_F32)
        self._lib.tt_logsumexp(self._pool.handle, logits.data_ptr(), out.data_ptr(), rows, size)
        return out

    def softmax(self, logits: Tensor) -> Tensor:
        _check("logits", logits, _F32, 2)
        rows, size = logits.shape
        out = torch.empty((rows, size), dtype=_F32)
        self._lib.tt_softmax(self._pool.handle, logits.data_ptr(), out.data_ptr(), rows, size)
        return out

    def exp(self, x: Tensor) -> Tensor:
        """The kernels' own `e^x` (at most 2 ulp off), float32 of any shape."""
        _check("x", x, _F32, x.dim())
        out = torch.empty_like(x)
        self._lib.tt_exp(self._pool.handle, x.data_ptr(), out.data_ptr(), x.numel())
        return out


def _check(name: str, tensor: Tensor, dtype: torch.dtype, dims: int, last: int = -1) -> None:
    """C reads raw memory: anything but the exact dtype, shape and layout must stop here."""
    if (
        tensor.dtype is dtype
        and tensor.dim() == dims
        and (last < 0 or tensor.shape[-1] == last)
        and tensor.is_contiguous()
        and not tensor.is_cuda
    ):
        return
    shape = f"{dims} dimensions" + (f", the last of size {last}" if last >= 0 else "")
    layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
    raise ValueError(
        f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, {layout}; "
        f"the native kernels need contiguous {dtype} on the CPU with {shape}"
    )


def _matrix(matrix: PackedMatrix) -> NativeMatrix:
    if not isinstance(matrix, NativeMatrix):
        raise TypeError(f"the weight is a {type(matrix).__name__}; pack it with these kernels")
    return matrix


def _kv(kv: LayerKV, heads: HeadShape, block_size: int) -> NativeKV:
    if not isinstance(kv, NativeKV):
        raise TypeError(f"the KV is a {type(kv).__name__}; allocate it with these kernels")
    if (
        kv.block_size != block_size
        or kv.num_kv_heads != heads.num_kv_heads
        or kv.head_dim != heads.head_dim
    ):
        raise ValueError(
            f"the KV has block_size {kv.block_size}, {kv.num_kv_heads} kv heads of {kv.head_dim}; "
            f"the step has block_size {block_size} and the layer {heads.num_kv_heads} of "
            f"{heads.head_dim}"
        )
    return kv
