"""The noise is Philox4x32-10, is uniform, and depends on nothing but (seed, choice, position)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tokentight.sampling.noise import philox4x32, uniform

MASK = 0xFFFFFFFF


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's rounds in plain Python integers."""
    left0, right0, left1, right1 = counter
    key0, key1 = key
    for round_number in range(10):
        if round_number:
            key0 = (key0 + 0x9E3779B9) & MASK
            key1 = (key1 + 0xBB67AE85) & MASK
        high0, low0 = divmod(left0 * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(left1 * 0xCD9E8D57, 1 << 32)
        left0, right0, left1, right1 = high1 ^ right0 ^ key0, low1, high0 ^ right1 ^ key1, low0
    return left0, right0, left1, right1


# Random123's known-answer tests for philox4x32, 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    words = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert tuple(words[0].tolist()) == answer
    assert plain_philox(counter, key) == answer


word = st.integers(0, MASK)


@given(st.lists(st.tuples(*[word] * 6), min_size=1, max_size=8))
def test_vectorised_rows_equal_plain_integers(rows: list[tuple[int, ...]]) -> None:
    array = np.array(rows, dtype=np.uint32)
    words = philox4x32(array[:, :4], array[:, 4:])
    assert [tuple(row) for row in words.tolist()] == [plain_philox(r[:4], r[4:]) for r in rows]


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)),
        min_size=1,
        max_size=8,
    )
)
def test_uniform_is_the_top_53_bits_of_two_words(rows: list[tuple[int, int, int]]) -> None:
    seeds = np.array([r[0] for r in rows], np.uint64)
    choices = np.array([r[1] for r in rows], np.int32)
    positions = np.array([r[2] for r in rows], np.int32)
    values = uniform(seeds, choices, positions)
    assert values.dtype == np.float64
    for (seed, choice, position), value in zip(rows, values.tolist(), strict=True):
        low, high, _, _ = plain_philox((position, choice, 0, 0), (seed & MASK, seed >> 32))
        assert value == ((high << 32 | low) >> 11) / 2**53
        assert 0.0 <= value < 1.0


def test_no_rows_give_no_noise() -> None:
    empty = np.zeros(0, np.int32)
    assert uniform(np.zeros(0, np.uint64), empty, empty).shape == (0,)


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_uniform_and_uncorrelated_along_each_axis(axis: str) -> None:
    """Neighbouring seeds, choices and positions give independent uniform numbers."""
    count = 20_000
    steps = np.arange(count)
    fixed = np.full(count, 7)
    values = uniform(
        (steps if axis == "seed" else fixed).astype(np.uint64),
        (steps if axis == "choice" else fixed).astype(np.int32),
        (steps if axis == "position" else fixed).astype(np.int32),
    )
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    pairs, _, _ = np.histogram2d(values[:-1:2], values[1::2], bins=8, range=[[0, 1], [0, 1]])
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-4
    assert len(np.unique(values)) == count
