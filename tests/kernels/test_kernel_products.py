"""Matrix products: right against float64, and every row by itself, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_bits, load, native, reference

SHAPES = ((16, 8), (50, 33), (49, 576), (576, 300), (1, 1), (160, 700))


def product_case(shape: tuple[int, int], rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(shape, generator=generator),
        torch.randn((rows, shape[1]), generator=generator),
        torch.randn(shape[0], generator=generator),
    )


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 13, 200])
def test_linear_is_close_to_float64(name: str, shape: tuple[int, int], rows: int) -> None:
    """Within the bound K * eps * sum|x||w| of a chain of K rounded operations."""
    weight, x, bias = product_case(shape, rows)
    kernels = load(name)
    for given_bias in (None, bias):
        actual = kernels.linear(x, kernels.pack(weight), given_bias)
        expected = x.double() @ weight.double().T + (0 if given_bias is None else bias.double())
        size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        assert ((actual - expected).abs() <= (shape[1] + 2) * 2.0**-24 * size).all()


@pytest.mark.parametrize("name", ["native", "reference"])
@given(
    shape=st.sampled_from(SHAPES),
    rows=st.integers(1, 210),
    picked=st.lists(st.integers(0, 209), min_size=1, max_size=40),
    bf16=st.booleans(),
    threads=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_a_row_of_a_product_does_not_depend_on_its_company(
    name: str, shape: tuple[int, int], rows: int, picked: list[int], bf16: bool, threads: int
) -> None:
    """Any rows, in any order and number, on any thread count: the bits each has among all."""
    weight, x, bias = product_case(shape, rows)
    kernels = load(name)
    others = native(threads) if name == "native" else kernels
    storage = torch.bfloat16 if bf16 else torch.float32
    together = kernels.linear(x, kernels.pack(weight.to(storage)), bias)
    index = torch.tensor([i % rows for i in picked])
    assert_same_bits(
        others.linear(x[index], others.pack(weight.to(storage)), bias), together[index]
    )


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 31, 70])
def test_bfloat16_storage_gives_the_bits_of_float32_storage(rows: int, portable: bool) -> None:
    """Widening is exact, so the same values stored wider change nothing."""
    kernels = native(1, portable)
    weight, x, bias = product_case((72, 600), rows)
    narrow = weight.bfloat16()
    packed, wide = kernels.pack(narrow), kernels.pack(narrow.float())
    assert packed.nbytes * 2 == wide.nbytes
    assert_same_bits(kernels.linear(x, packed, bias), kernels.linear(x, wide, bias))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 11, 60])
@pytest.mark.parametrize("shape", SHAPES)
def test_portable_product_gives_the_bits_of_avx2(shape: tuple[int, int], rows: int) -> None:
    weight, x, bias = product_case(shape, rows)
    fast, portable = native(1), native(1, portable=True)
    assert_same_bits(
        fast.linear(x, fast.pack(weight), bias), portable.linear(x, portable.pack(weight), bias)
    )


def test_an_output_is_one_chain_of_fused_multiply_adds() -> None:
    """The order the kernel promises: from 0, k ascending, one rounding per step, then the bias."""
    weight, x, bias = product_case((3, 301), 2)
    actual = native().linear(x, native().pack(weight), bias)
    for i in range(2):
        for j in range(3):
            total = torch.zeros((), dtype=torch.float64)
            for k in range(301):  # a float32 product is exact in float64; the sum nearly always
                exact = x[i, k].double() * weight[j, k].double() + total
                total = exact.float().double()
            assert actual[i, j] == (total.float() + bias[j])


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_embed_returns_exactly_the_rows(name: str, storage: torch.dtype) -> None:
    kernels = load(name)
    table = torch.randn(37, 24).to(storage)
    ids = torch.tensor([36, 0, 5, 5, 17], dtype=torch.int32)
    assert_same_bits(kernels.embed(kernels.pack(table), ids), table[ids.long()].float())
    with pytest.raises(ValueError, match="36"):
        kernels.embed(kernels.pack(table), torch.tensor([37], dtype=torch.int32))


def test_wrong_inputs_are_refused_by_name() -> None:
    kernels = native()
    weight = kernels.pack(torch.randn(8, 4))
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        kernels.linear(torch.randn(2, 4, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match="last of size 4"):
        kernels.linear(torch.randn(2, 5), weight)
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.linear(torch.randn(4, 2).t(), weight)
    with pytest.raises(ValueError, match="bias"):
        kernels.linear(torch.randn(2, 4), weight, torch.randn(7))
    with pytest.raises(TypeError, match="pack it with these kernels"):
        kernels.linear(torch.randn(2, 4), reference().pack(torch.randn(8, 4)))
    with pytest.raises(ValueError, match="float16"):
        kernels.pack(torch.randn(8, 4).half())
