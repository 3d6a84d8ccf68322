"""The block pool as a state machine: whatever callers do, the books agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokentight.engine import block_pool
from tokentight.engine.block_pool import NO_OWNER, BlockPool, OutOfBlocksError

BLOCK_SIZE = 2


def tokens_of(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class PoolMachine(RuleBasedStateMachine):
    """Holders allocate, cache and release; newcomers share what a prefix lookup finds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, BLOCK_SIZE, enable_prefix_caching=True)
        self.holders: dict[int, tuple[np.ndarray, list[int]]] = {}
        self.next_holder = 0
        # What the KV of a block really holds: everything up to its end, and whose salt it is.
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), salt=st.sampled_from("ab"))
    def start(self, tokens: list[int], salt: str) -> None:
        array = tokens_of(*tokens)
        prefix = self.pool.find_prefix(array, salt)
        assert len(prefix) * BLOCK_SIZE < len(array), "nothing is left to compute"
        for index, block_id in enumerate(prefix):
            assert self.content[block_id] == (salt, tuple(tokens[: (index + 1) * BLOCK_SIZE]))
        needed = -(-len(array) // BLOCK_SIZE) - len(prefix)
        free = self.pool.num_free_blocks - self.pool.num_free_among(prefix)
        if needed > free:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(self.pool.num_free_blocks + 1, self.next_holder)
            return
        self.pool.share(prefix)
        own = self.pool.allocate(needed, self.next_holder)
        assert not set(own) & set(prefix)
        block_ids = prefix + own
        for index in range(len(prefix), len(block_ids)):
            end = (index + 1) * BLOCK_SIZE
            self.content[block_ids[index]] = (salt, tuple(tokens[:end]))
        num_full = len(array) // BLOCK_SIZE
        self.pool.cache(block_ids, array[: num_full * BLOCK_SIZE], salt)
        assert len(self.pool.find_prefix(tokens_of(*tokens, 9), salt)) == num_full
        self.holders[self.next_holder] = (array, block_ids)
        self.next_holder += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.holders)))
        _, block_ids = self.holders.pop(holder)
        self.pool.release(block_ids)

    @rule()
    def lose_the_kv(self) -> None:
        self.pool.drop_cache()
        assert not any(self.pool.is_cached(block_id) for block_id in range(8))

    @invariant()
    def no_block_is_both_free_and_used(self) -> None:
        held: dict[int, int] = {}
        for _, block_ids in self.holders.values():
            for block_id in block_ids:
                held[block_id] = held.get(block_id, 0) + 1
        for block_id in range(8):
            assert self.pool.ref_count(block_id) == held.get(block_id, 0)
            assert self.pool.is_free(block_id) == (block_id not in held)

    @invariant()
    def who_may_write_a_block_holds_it_alone(self) -> None:
        for block_id in range(8):
            owner = self.pool.owner(block_id)
            if owner != NO_OWNER:
                assert self.pool.ref_count(block_id) == 1
                assert not self.pool.is_cached(block_id)
                assert block_id in self.holders[owner][1]


TestPoolMachine = PoolMachine.TestCase


def test_blocks_shared_hold_the_same_tokens_after_the_same_prefix() -> None:
    """Equal tokens after different prefixes are different blocks."""
    pool = BlockPool(8, BLOCK_SIZE, enable_prefix_caching=True)
    first = pool.allocate(2, 0)
    pool.cache(first, tokens_of(1, 2, 3, 4), "")
    assert pool.find_prefix(tokens_of(1, 2, 3, 4, 5), "") == first
    assert pool.find_prefix(tokens_of(9, 9, 3, 4, 5), "") == []
    assert pool.find_prefix(tokens_of(1, 2, 3, 4, 5), "salt") == []


def test_a_hash_collision_hands_out_nobodys_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every key equal, only the comparison of tokens keeps prompts apart."""
    monkeypatch.setattr(block_pool, "child_key", lambda parent_key, tokens: b"same")
    pool = BlockPool(8, BLOCK_SIZE, enable_prefix_caching=True)
    pool.cache(pool.allocate(1, 0), tokens_of(1, 2), "")
    assert pool.find_prefix(tokens_of(3, 4, 5), "") == []
    assert len(pool.find_prefix(tokens_of(1, 2, 5), "")) == 1


def test_the_least_recently_used_prefix_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, BLOCK_SIZE, enable_prefix_caching=True)
    old, new = pool.allocate(2, 0), pool.allocate(2, 1)
    pool.cache(old, tokens_of(1, 1, 2, 2), "")
    pool.cache(new, tokens_of(3, 3, 4, 4), "")
    pool.release(old)
    pool.release(new)
    pool.allocate(1, 2)
    assert pool.find_prefix(tokens_of(1, 1, 2, 2, 0), "") == old[:1]
    assert pool.find_prefix(tokens_of(3, 3, 4, 4, 0), "") == new


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_blocks_cached_one_by_one_are_found_as_if_cached_at_once(
    first: list[int], second: list[int]
) -> None:
    """Also where some of them stay private because equal ones are cached already."""
    found = []
    for one_by_one in (False, True):
        pool = BlockPool(16, BLOCK_SIZE, enable_prefix_caching=True)
        for holder, tokens in enumerate((first, second)):
            ends = range(0, len(tokens) + 1, BLOCK_SIZE)
            block_ids = pool.allocate(len(tokens) // BLOCK_SIZE, holder)
            for end in ends if one_by_one else ends[-1:]:
                pool.cache(block_ids, tokens_of(*tokens[:end]), "")
        found.append([pool.find_prefix(tokens_of(*tokens, 9), "") for tokens in (first, second)])
    assert found[0] == found[1]
    assert len(found[0][1]) == len(second) // BLOCK_SIZE


def test_a_block_used_anew_forgets_what_it_held() -> None:
    """Whether it was evicted, given up unshared, or its KV lost."""
    pool = BlockPool(2, BLOCK_SIZE, enable_prefix_caching=True)
    lives = [(1, 1), (1, 1), (2, 2)]
    first, second = pool.allocate(1, 0), pool.allocate(1, 1)
    pool.cache(first, tokens_of(1, 1), "")
    pool.cache(second, tokens_of(1, 1), "")  # stays private
    pool.release(second)
    pool.release(first)
    for tokens in lives:
        both = pool.allocate(2, 2)
        pool.cache(both, tokens_of(*tokens, 5, 5), "")
        assert pool.find_prefix(tokens_of(*tokens, 5, 5, 0), "") == both
        pool.release(both)
    pool.drop_cache()
    again = pool.allocate(2, 3)
    pool.cache(again, tokens_of(3, 3, 4, 4), "")
    assert pool.find_prefix(tokens_of(3, 3, 4, 4, 0), "") == again


def test_blocks_that_hold_nothing_known_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3, BLOCK_SIZE, enable_prefix_caching=True)
    cached, plain = pool.allocate(1, 0), pool.allocate(2, 1)
    pool.cache(cached, tokens_of(1, 1), "")
    pool.release(cached)
    pool.release(plain)
    assert set(pool.allocate(2, 2)) == set(plain)
    assert pool.find_prefix(tokens_of(1, 1, 0), "") == cached


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, BLOCK_SIZE, enable_prefix_caching=False)
    pool.cache(pool.allocate(1, 0), tokens_of(1, 2), "")
    assert pool.find_prefix(tokens_of(1, 2, 3), "") == []


def test_releasing_a_free_block_is_a_bug_that_shows() -> None:
    pool = BlockPool(4, BLOCK_SIZE, enable_prefix_caching=True)
    block_ids = pool.allocate(1, 0)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released while free"):
        pool.release(block_ids)
