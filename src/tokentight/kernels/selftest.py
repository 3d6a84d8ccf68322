"""Does a row keep its bits here, on this machine and with this many threads?

The native kernels are built so that it does. The reference runs on torch, whose code for a fixed
shape usually treats every index alike, but nothing promises it. So the same rows are computed
alone, in other company, at other indices and in other counts, with the model's own shapes, and
compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokentight.kernels.interface import HeadShape, Kernels, RopeTable, StepInputs
from tokentight.kernels.reference import ReferenceKernels, ReferenceTiles

REFERENCE_TILES = (
    ReferenceTiles(64, 8),
    ReferenceTiles(32, 8),
    ReferenceTiles(16, 8),
    ReferenceTiles(16, 1),
    ReferenceTiles(1, 1),
)
_NUM_ROWS = 67  # more than one tile of the reference, and no multiple of anything
_NUM_LARGE_ROWS = 19
_LARGE = 1 << 22
_NOISE = 1 << 18


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What the self-test runs: `matrices` are `(out, in)` of every weight of the stage."""

    hidden_size: int
    intermediate_size: int
    heads: HeadShape
    block_size: int
    matrices: tuple[tuple[int, int], ...]
    weight_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """`failures` names each operation whose rows changed with their company; empty: none did."""

    kernels: str
    failures: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.failures

    def summary(self) -> str:
        """One line for the log."""
        if self.holds:
            return f"self-test: rows of the {self.kernels} kernels do not depend on their company"
        return (
            f"self-test: rows of the {self.kernels} kernels DEPEND on their company in "
            f"{'; '.join(self.failures)}: answers may change with load"
        )


def check_row_invariance(kernels: Kernels, shapes: ModelShapes) -> SelfTestResult:
    """Run every operation of `kernels` in varied company and compare bits."""
    failures = tuple(failure for failure in _failures(kernels, shapes) if failure)
    return SelfTestResult(_describe(kernels), failures)


def fit_reference(
    kernels: ReferenceKernels,
    shapes: ModelShapes,
    candidates: Sequence[ReferenceTiles] = REFERENCE_TILES,
) -> tuple[ReferenceKernels, SelfTestResult]:
    """The reference with the first of `candidates`, largest first, that keeps rows' bits.

    Where none does, the last candidate comes back with its failures.
    """
    if not candidates:
        raise ValueError("candidates is empty; give at least one ReferenceTiles")
    for tiles in candidates:
        fitted = ReferenceKernels(kernels.device, tiles)
        result = check_row_invariance(fitted, shapes)
        if result.holds:
            break
    return fitted, result


def fit_kernels(kernels: Kernels, shapes: ModelShapes) -> tuple[Kernels, SelfTestResult]:
    """`fit_reference` for the reference, `check_row_invariance` for any other kernels."""
    if isinstance(kernels, ReferenceKernels):
        return fit_reference(kernels, shapes)
    return kernels, check_row_invariance(kernels, shapes)


def _describe(kernels: Kernels) -> str:
    if isinstance(kernels, ReferenceKernels):
        tiles = kernels.tiles
        return f"{kernels.name} ({tiles.rows} rows, {tiles.query_tiles} query tiles)"
    return kernels.name


def _failures(kernels: Kernels, shapes: ModelShapes) -> Iterator[str | None]:
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(20))
    noise = noise.to(kernels.device)

    def values(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        repeats = -(-rows * columns // _NOISE)
        return noise.repeat(repeats)[: rows * columns].view(rows, columns) * scale

    hidden = values(_NUM_ROWS, shapes.hidden_size)
    weight = 1.0 + 0.1 * values(1, shapes.hidden_size)[0]
    yield _compare("rms_norm", lambda x: kernels.rms_norm(x, weight, 1e-5), hidden)
    yield _compare(
        "add_rms_norm",
        lambda x: kernels.add_rms_norm(x, x.flip(1).contiguous(), weight, 1e-5),
        hidden,
    )
    yield _compare("silu_mul", kernels.silu_mul, values(_NUM_ROWS, 2 * shapes.intermediate_size))
    for out, columns in sorted(set(shapes.matrices)):
        matrix = kernels.pack(values(out, columns, columns**-0.5).to(shapes.weight_dtype))
        rows = _NUM_ROWS if out * columns <= _LARGE else _NUM_LARGE_ROWS
        yield _compare(
            f"linear {out} x {columns}",
            lambda x, matrix=matrix: kernels.linear(x, matrix),  # type: ignore[misc]
            values(rows, columns),
        )
    logits = values(5, max(out for out, _ in shapes.matrices), 4.0)
    yield _compare("softmax", kernels.softmax, logits)
    yield _compare("logsumexp", kernels.logsumexp, logits)
    yield from _attention_failures(kernels, shapes)


def _compare(name: str, operation: Callable[[Tensor], Tensor], x: Tensor) -> str | None:
    """Every index is reached by one row (all rows equal) and by its neighbour's row (shifted)."""
    count = x.shape[0]
    together = operation(x)
    alike = operation(x[:1].repeat(count, 1))
    if not _same_bits(alike, together[:1].expand_as(alike)):
        return f"{name} (index in the tile)"
    for rows in (slice(1, None), slice(0, 1), slice(count - 1, None), slice(2, 5)):
        if not _same_bits(operation(x[rows].clone()), together[rows]):
            return f"{name} ({x[rows].shape[0]} of {count} rows)"
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def _attention_failures(kernels: Kernels, shapes: ModelShapes) -> Iterator[str | None]:
    """Three requests at once in one go, against each alone in chunks: projections' output equal."""
    lengths, chunks = (45, 18, 71), (7, 18, 64)
    for window in (None, 20):
        together = _attend(kernels, shapes, lengths, [lengths], window)
        for request, (length, chunk) in enumerate(zip(lengths, chunks, strict=True)):
            steps = []
            for end in [*range(chunk, length, chunk), length]:
                step = [0] * len(lengths)
                step[request] = end
                steps.append(tuple(step))
            alone = _attend(kernels, shapes, lengths, steps, window)
            if not _same_bits(alone[request], together[request]):
                yield "attention" + ("" if window is None else f" (window {window})")
                break


def _attend(
    kernels: Kernels,
    shapes: ModelShapes,
    lengths: Sequence[int],
    ends_by_step: Sequence[Sequence[int]],
    window: int | None,
) -> list[Tensor]:
    """Outputs per request; step `s` brings request `r` up to position `ends_by_step[s][r]`."""
    heads, size, device = shapes.heads, shapes.block_size, kernels.device
    dim = heads.head_dim
    generator = torch.Generator().manual_seed(21)
    columns = (heads.num_heads + 2 * heads.num_kv_heads) * dim
    inputs = [torch.randn((n, columns), generator=generator).to(device) for n in lengths]
    angles = torch.outer(torch.arange(max(lengths)), 0.5 ** torch.arange(dim // 2))
    rope = RopeTable(angles.cos().to(device), angles.sin().to(device))
    width = -(-max(lengths) // size)
    tables = 1 + torch.arange(len(lengths) * width).view(len(lengths), width)
    kv = kernels.allocate_kv(heads, len(lengths) * width + 1, size)
    outputs: list[list[Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    for ends in ends_by_step:
        active = [r for r in range(len(lengths)) if ends[r] > done[r]]
        positions = [torch.arange(done[r], ends[r]) for r in active]
        counts = [len(p) for p in positions]
        slots = [
            tables[r][p // size] * size + p % size for r, p in zip(active, positions, strict=True)
        ]
        flat = torch.cat(positions).int()
        step = StepInputs(
            token_ids=flat.to(device),
            positions=flat.to(device),
            slots=torch.cat(slots).to(device),
            query_starts=torch.tensor([0, *counts]).cumsum(0).int().to(device),
            context_lens=torch.tensor([ends[r] for r in active]).int().to(device),
            block_tables=tables[active].int().to(device),
            block_size=size,
        )
        qkv = torch.cat([inputs[r][done[r] : ends[r]] for r in active])
        q = kernels.rope_and_cache(qkv, step, kv, heads, rope, None, None, 1e-6)
        out = kernels.attention(q, step, kv, heads, dim**-0.5, window)
        for r, part in zip(active, torch.split(out, counts), strict=True):
            outputs[r].append(part)
            done[r] = ends[r]
    return [torch.cat(parts) if parts else torch.empty(0) for parts in outputs]
