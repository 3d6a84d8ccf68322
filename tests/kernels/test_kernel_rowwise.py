"""Norms, activations, softmax and friends: close to float64, each row by itself bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_bits, load, native
from torch import Tensor

from tokentight.kernels.interface import Kernels

NAMES = ["native", "reference"]


def norm_weight(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size)


OPERATIONS: dict[str, Callable[[Kernels, Tensor], Tensor]] = {
    "rms_norm": lambda k, x: k.rms_norm(x, norm_weight(x.shape[1]), 1e-5),
    "add_rms_norm": lambda k, x: k.add_rms_norm(x, 2 * x, norm_weight(x.shape[1]), 1e-5),
    "silu_mul": lambda k, x: k.silu_mul(x),
    "softmax": lambda k, x: k.softmax(x),
    "logsumexp": lambda k, x: k.logsumexp(x),
    "argmax": lambda k, x: k.argmax(x).float(),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operation", OPERATIONS)
@given(
    columns=st.sampled_from([2, 6, 8, 14, 32, 70, 576, 1030]),
    rows=st.integers(1, 70),
    picked=st.lists(st.integers(0, 69), min_size=1, max_size=20),
    threads=st.integers(1, 3),
)
@settings(max_examples=20, deadline=None)
def test_a_row_does_not_depend_on_its_company(
    name: str, operation: str, columns: int, rows: int, picked: list[int], threads: int
) -> None:
    x = 3 * torch.randn((rows, columns), generator=torch.Generator().manual_seed(columns))
    kernels = load(name)
    others = native(threads) if name == "native" else kernels
    index = torch.tensor([i % rows for i in picked])
    together = OPERATIONS[operation](kernels, x)
    assert_same_bits(OPERATIONS[operation](others, x[index]), together[index])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("columns", [2, 10, 64, 1000])
def test_portable_build_gives_the_bits_of_avx2(operation: str, columns: int) -> None:
    x = 10 * torch.randn(5, columns)
    assert_same_bits(
        OPERATIONS[operation](native(1, portable=True), x), OPERATIONS[operation](native(), x)
    )


def test_exp_is_within_one_and_a_half_ulp() -> None:
    """Over all magnitudes, subnormal results included, against float64."""
    x = torch.cat((torch.linspace(-104, 88.72, 400_001), torch.randn(100_001)))
    exact = torch.exp(x.double())
    rounded = exact.float()
    ulp = (torch.nextafter(rounded, torch.tensor(math.inf)) - rounded).double()
    assert ((native().exp(x) - exact).abs() / ulp).max() <= 1.5
    assert_same_bits(native(1, portable=True).exp(x), native().exp(x))


def test_exp_does_not_depend_on_the_lane() -> None:
    x = torch.randn(64)
    together = native().exp(x)
    for i in range(64):
        assert_same_bits(native().exp(x[i:]), together[i:])
        assert_same_bits(native().exp(x[i : i + 1]), together[i : i + 1])


@pytest.mark.parametrize("portable", [False, True])
def test_exp_of_extremes(portable: bool) -> None:
    x = torch.tensor([-math.inf, -1e30, -200.0, -0.0, 0.0, 88.8, 1e30, math.inf, math.nan])
    out = native(1, portable).exp(x)
    assert out[:8].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, math.inf, math.inf, math.inf]
    assert out[8].isnan()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [6, 64, 576])
def test_norms_are_close_to_float64(name: str, columns: int) -> None:
    """Relative error below 1e-6; the residual is updated in place, exactly."""
    kernels, weight = load(name), norm_weight(columns)
    x, residual = torch.randn(9, columns), torch.randn(9, columns)

    def oracle(v: Tensor) -> Tensor:
        v = v.double()
        return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-5).double(), oracle(x), rtol=1e-6, atol=1e-7
    )
    total = x + residual
    out = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert_same_bits(residual, total)
    torch.testing.assert_close(out.double(), oracle(total), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_silu_mul_is_close_to_float64(name: str) -> None:
    """Relative error below 1e-6, and exact zeros and no NaN at the far ends."""
    x = 20 * torch.randn(7, 90)
    x[0, :3] = torch.tensor([-1e30, -200.0, 1e30])
    gate, up = x.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    actual = load(name).silu_mul(x).double()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [2, 50, 300, 5000])
def test_softmax_and_logsumexp_are_close_to_float64(name: str, columns: int) -> None:
    """Relative 5e-6 at logits near 40; a logit of -inf has probability exactly 0."""
    kernels = load(name)
    x = 10 * torch.randn(4, columns)
    x[1, 0] = -math.inf
    p = kernels.softmax(x)
    torch.testing.assert_close(p.double(), x.double().softmax(1), rtol=5e-6, atol=1e-30)
    assert p[1, 0] == 0
    torch.testing.assert_close(
        kernels.logsumexp(x).double(), x.double().logsumexp(1), rtol=2e-6, atol=1e-6
    )


def test_logsumexp_of_extremes() -> None:
    x = torch.tensor([[-math.inf, -math.inf], [math.inf, 0.0], [-math.inf, 3.0], [1e30, -1e30]])
    assert native().logsumexp(x).tolist() == [-math.inf, math.inf, 3.0, x[3, 0].item()]


@pytest.mark.parametrize("name", NAMES)
def test_argmax_takes_the_lowest_index_and_never_a_nan(name: str) -> None:
    x = torch.zeros(4, 37)
    x[0, [9, 20, 36]] = 2.0
    x[1, 36] = 1.0
    x[2] = -math.inf
    x[3, 5], x[3, 7] = math.nan, 1.0
    out = load(name).argmax(x)
    assert out.dtype == torch.int64
    assert out.tolist() == [9, 36, 0, 7]
    assert load(name).argmax(torch.zeros(0, 5)).shape == (0,)


def test_the_callers_flush_to_zero_mode_changes_nothing() -> None:
    """Subnormals follow IEEE in every thread, whatever mode torch was put into."""
    x = torch.linspace(-100, -88, 4096)
    expected = native(1).exp(x)
    assert (expected > 0).all()
    supported = torch.set_flush_denormal(True)
    try:
        flushed = native(1).exp(x)
    finally:
        torch.set_flush_denormal(False)
    if not supported:
        pytest.skip("this CPU has no flush-to-zero mode")
    assert_same_bits(flushed, expected)
