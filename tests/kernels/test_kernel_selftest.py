"""The self-test passes kernels whose rows keep their bits and names the operation that breaks."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import native
from torch import Tensor

from tokentight.kernels.interface import HeadShape, LayerKV, PackedMatrix, StepInputs
from tokentight.kernels.reference import ReferenceKernels, ReferenceTiles
from tokentight.kernels.selftest import (
    ModelShapes,
    check_row_invariance,
    fit_kernels,
    fit_reference,
)

SHAPES = ModelShapes(
    hidden_size=48,
    intermediate_size=96,
    heads=HeadShape(4, 2, 16),
    block_size=16,
    matrices=((128, 48), (48, 64), (192, 48), (48, 96), (300, 48)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_native_kernels_hold(dtype: torch.dtype, threads: int) -> None:
    shapes = ModelShapes(48, 96, HeadShape(4, 2, 16), 32, SHAPES.matrices, dtype)
    kernels, result = fit_kernels(native(threads), shapes)
    assert kernels is native(threads)
    assert result.holds, result.summary()


def test_some_reference_tile_holds() -> None:
    """Tiles of one row hold by construction, so a fit always ends well on the CPU."""
    kernels, result = fit_kernels(ReferenceKernels(), SHAPES)
    assert isinstance(kernels, ReferenceKernels)
    assert result.holds, result.summary()
    assert "do not depend" in result.summary()


class LastRowDrifts(ReferenceKernels):
    """As a vectorised loop's tail might: the last row of a product is off by one bit."""

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        out = super().linear(x, weight, bias)
        out[-1] = torch.nextafter(out[-1], torch.tensor(torch.inf))
        return out


class RowCountDrifts(ReferenceKernels):
    """As a library that picks other code for few rows."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = super().rms_norm(x, weight, eps)
        return out if x.shape[0] > 8 else torch.nextafter(out, torch.tensor(torch.inf))


class ChunkDrifts(ReferenceKernels):
    """As an attention whose tiles start at the chunk instead of at the position."""

    def attention(
        self,
        q: Tensor,
        step: StepInputs,
        kv: LayerKV,
        heads: HeadShape,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out = super().attention(q, step, kv, heads, scale, window)
        out[0] = torch.nextafter(out[0], torch.tensor(torch.inf))
        return out


@pytest.mark.parametrize(
    ("kernels", "operation"),
    [(LastRowDrifts(), "linear"), (RowCountDrifts(), "rms_norm"), (ChunkDrifts(), "attention")],
)
def test_a_planted_dependence_is_named(kernels: ReferenceKernels, operation: str) -> None:
    result = check_row_invariance(kernels, SHAPES)
    assert not result.holds
    assert any(failure.startswith(operation) for failure in result.failures)
    assert "DEPEND" in result.summary()


def test_fit_takes_the_first_tiles_that_hold() -> None:
    candidates = (ReferenceTiles(2, 2), ReferenceTiles(1, 1))
    kernels, result = fit_reference(ReferenceKernels(), SHAPES, candidates)
    assert kernels.tiles in candidates
    assert result.holds
    with pytest.raises(ValueError, match="candidates is empty"):
        fit_reference(ReferenceKernels(), SHAPES, ())
