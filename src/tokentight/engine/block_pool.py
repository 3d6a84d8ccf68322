"""KV blocks: who owns which, which are free, and which free or shared ones hold a known prefix.

A block is either *in use* (reference count above zero) or *free*. A full block whose KV is
computed can be *cached*: it keeps its key while in use and after it became free, until it is
taken for something else. Cached blocks are never written again.

A key is SHA-256 over the parent's key and the block's tokens, the salt standing at the root; on a
hit the tokens themselves are compared too, so that a collision cannot hand out another caller's
text.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_OWNER = -1


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """What a cached block holds: its tokens, after the prefix that `parent_key` stands for."""

    key: bytes
    parent_key: bytes
    tokens: bytes


class OutOfBlocksError(RuntimeError):
    """Fewer blocks are free than were asked for."""


def root_key(salt: str) -> bytes:
    return hashlib.sha256(b"tokentight prefix\0" + salt.encode()).digest()


def child_key(parent_key: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent_key + tokens).digest()


class BlockPool:
    """The `num_blocks` KV blocks of `block_size` positions each."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks is {num_blocks} and block_size {block_size}; both must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._owners = np.full(num_blocks, NO_OWNER, dtype=np.int64)
        # Least recently used first; values are unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached_by_key: dict[bytes, int] = {}
        self._cached: dict[int, CachedBlock] = {}
        # Of every full block that was offered for caching, taken or not, until it is allocated
        # anew: where the chain of keys goes on.
        self._keys: dict[int, bytes] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def ref_count(self, block_id: int) -> int:
        return int(self._ref_counts[block_id])

    def ref_counts(self, block_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """How many requests hold each of the blocks."""
        return self._ref_counts[block_ids]

    def owner(self, block_id: int) -> int:
        """The number of the request that may write the block, or `NO_OWNER`."""
        return int(self._owners[block_id])

    def owners(self, block_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """`owner` of each of the blocks."""
        return self._owners[block_ids]

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def allocate(self, num_blocks: int, owner: int) -> list[int]:
        """Take blocks for `owner` to write, evicting the least recently used cached ones.

        Raises:
            OutOfBlocksError: and nothing is taken.
        """
        if num_blocks > len(self._free):
            raise OutOfBlocksError(f"{num_blocks} blocks asked for, {len(self._free)} are free")
        taken = []
        for _ in range(num_blocks):
            block_id, _ = self._free.popitem(last=False)
            self._forget_cached(block_id)
            self._ref_counts[block_id] = 1
            self._owners[block_id] = owner
            taken.append(block_id)
        return taken

    def release(self, block_ids: Iterable[int]) -> None:
        """Give up one reference to each block. A request's last blocks become reusable first:
        the head of a prefix is worth more than its tail."""
        for block_id in reversed(list(block_ids)):
            count = self.ref_count(block_id)
            assert count > 0, f"block {block_id} released while free"
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._owners[block_id] = NO_OWNER
                self._free[block_id] = None
                if block_id not in self._cached:
                    self._free.move_to_end(block_id, last=False)

    def find_prefix(self, tokens: NDArray[np.int32], salt: str) -> list[int]:
        """Cached blocks that hold the longest known prefix of `tokens`, always leaving at least
        one token to compute. Nothing is taken yet: see `share`."""
        if not self.enable_prefix_caching:
            return []
        found = []
        parent_key = root_key(salt)
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            block_tokens = tokens[start : start + self.block_size].tobytes()
            key = child_key(parent_key, block_tokens)
            block_id = self._cached_by_key.get(key)
            if block_id is None or self._cached[block_id] != CachedBlock(
                key, parent_key, block_tokens
            ):
                break
            found.append(block_id)
            parent_key = key
        return found

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to cached blocks."""
        for block_id in block_ids:
            assert block_id in self._cached, f"block {block_id} is shared but not cached"
            self._ref_counts[block_id] += 1
            self._free.pop(block_id, None)

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        return sum(block_id in self._free for block_id in block_ids)

    def cache(self, block_ids: Sequence[int], tokens: NDArray[np.int32], salt: str) -> None:
        """Remember that the first blocks of `block_ids` hold `tokens` (whole blocks of them).

        Goes on where it left off: only blocks that are new since the last call are looked at.
        Where an equal block is cached already, this one stays private.
        """
        if not self.enable_prefix_caching:
            return
        end = len(tokens) // self.block_size
        first = end
        while first > 0 and block_ids[first - 1] not in self._keys:
            first -= 1
        parent_key = self._keys[block_ids[first - 1]] if first > 0 else root_key(salt)
        for index in range(first, end):
            block_id = block_ids[index]
            start = index * self.block_size
            block_tokens = tokens[start : start + self.block_size].tobytes()
            key = child_key(parent_key, block_tokens)
            if key not in self._cached_by_key:
                self._cached_by_key[key] = block_id
                self._cached[block_id] = CachedBlock(key, parent_key, block_tokens)
                self._owners[block_id] = NO_OWNER
            self._keys[block_id] = parent_key = key

    def drop_cache(self) -> None:
        """Forget every cached prefix (the KV behind it is gone)."""
        self._cached_by_key.clear()
        self._cached.clear()
        self._keys.clear()

    def _forget_cached(self, block_id: int) -> None:
        self._keys.pop(block_id, None)
        cached = self._cached.pop(block_id, None)
        if cached is not None:
            del self._cached_by_key[cached.key]
