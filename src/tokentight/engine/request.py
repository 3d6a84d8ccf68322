"""A request and its ledger: the only place where a request's tokens are kept.

Tokens are appended and never changed. How many of them the KV cache holds is the one other count,
and it belongs to the same owner. What anybody else needs (positions, slots, what a step reads)
is derived from these when a plan is built, and checked against them before it is sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tokentight.engine.outputs import TokenLogprobs
from tokentight.sampling.params import SamplingParams


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a caller asks: one prompt, one choice.

    `request_id` is the caller's name for it. `cache_salt` separates prefix caches: only requests
    with the same salt share blocks.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    choice: int = 0
    cache_salt: str = ""
    skip_special_tokens: bool = True


class Ledger:
    """The append-only tokens of one request, prompt then output, int32."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        if not prompt_token_ids:
            raise ValueError("a request needs at least one prompt token")
        self.num_prompt_tokens = len(prompt_token_ids)
        self._tokens: NDArray[np.int32] = np.array(prompt_token_ids, dtype=np.int32)
        self._num_tokens = self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_output_tokens(self) -> int:
        return self._num_tokens - self.num_prompt_tokens

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens, read-only."""
        view = self._tokens[: self._num_tokens]
        view.flags.writeable = False
        return view

    def append(self, token_id: int) -> None:
        if self._num_tokens == len(self._tokens):
            grown = np.empty(2 * len(self._tokens), dtype=np.int32)
            grown[: self._num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self._num_tokens] = token_id
        self._num_tokens += 1


class Request:
    """One request in the engine: its ledger, its KV blocks and where it is in its life.

    `number` is the engine's own, unique and ascending with arrival; first come, first served
    means lowest number first. `seed` is what its noise is keyed by, drawn at arrival when the
    caller gave none, so that a recomputed token is the same token.
    """

    def __init__(
        self, asked: GenerationRequest, number: int, seed: int, max_num_tokens: int
    ) -> None:
        self.asked = asked
        self.number = number
        self.seed = seed
        self.max_num_tokens = max_num_tokens
        self.ledger = Ledger(asked.prompt_token_ids)
        self.state = RequestState.WAITING
        self.block_ids = array("i")  # int32
        self.num_cached_tokens = 0
        self.in_flight = False
        self.abort_requested = False
        self._num_computed_tokens = 0
        num_scored = self.ledger.num_prompt_tokens - 1 if self.wants_prompt_logprobs else 0
        self._prompt_logprobs: list[TokenLogprobs | None] = [None] * num_scored

    @property
    def params(self) -> SamplingParams:
        return self.asked.params

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.asked.params.prompt_logprobs is not None

    @property
    def num_tokens(self) -> int:
        return self.ledger.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """How many of the ledger's tokens the KV blocks hold."""
        return self._num_computed_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.ledger.num_tokens - self._num_computed_tokens

    @property
    def samples_when_computed(self) -> bool:
        """Whether a token is to be sampled once every token's KV is there."""
        return self.ledger.num_tokens < self.max_num_tokens

    @property
    def prompt_logprobs_complete(self) -> bool:
        return all(entry is not None for entry in self._prompt_logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """Entry i belongs to prompt token i; nothing stands before the first."""
        return (None, *self._prompt_logprobs)

    def advance(self, num_scheduled_tokens: int) -> None:
        """The KV now holds `num_scheduled_tokens` more of this request's tokens."""
        computed = self._num_computed_tokens + num_scheduled_tokens
        assert num_scheduled_tokens > 0
        assert computed <= self.ledger.num_tokens
        self._num_computed_tokens = computed

    def adopt_cached_prefix(self, block_ids: Sequence[int], num_cached_tokens: int) -> None:
        """Start from cached blocks that hold this request's first tokens."""
        assert self._num_computed_tokens == 0
        assert not self.block_ids
        assert num_cached_tokens < self.ledger.num_tokens
        self.block_ids.extend(block_ids)
        self._num_computed_tokens = num_cached_tokens

    def forget_kv(self) -> Sequence[int]:
        """Preempt: the KV is given up, the tokens stay. Returns the blocks to release."""
        block_ids, self.block_ids = self.block_ids, array("i")
        self._num_computed_tokens = 0
        return block_ids

    def record_prompt_logprob(self, prompt_index: int, entry: TokenLogprobs) -> None:
        """The first record stands. One made again after a preemption has the same bits wherever
        the kernels keep the promise; where they do not, it must not cost anybody the engine."""
        if self._prompt_logprobs[prompt_index - 1] is None:
            self._prompt_logprobs[prompt_index - 1] = entry
