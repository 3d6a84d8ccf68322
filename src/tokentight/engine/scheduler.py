"""Which requests compute which of their tokens in the next step.

Continuous batching: decodes and prefill chunks share a step under one token budget. First come,
first served: running requests are served in order of arrival, every decode is guaranteed its one
token before prefill chunks get the rest, and when blocks run out the youngest idle request is
preempted (its KV is given up and recomputed later; its tokens stay in its ledger). A request is
in at most one plan at a time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokentight.engine.batch import BatchRows
from tokentight.engine.block_pool import BlockPool
from tokentight.engine.request import Request, RequestState


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request and how many of its tokens this step computes."""

    request: Request
    num_scheduled_tokens: int

    def __post_init__(self) -> None:
        assert 0 < self.num_scheduled_tokens <= self.request.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_batched_tokens` per step, `max_num_seqs` running at once, over `num_stages`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_stages: int

    @property
    def max_plans_in_flight(self) -> int:
        """One plan per stage keeps every stage busy; one more waits at the first stage while the
        driver handles a result. A single stage has nothing to overlap."""
        return self.num_stages + 1 if self.num_stages > 1 else 1


class Scheduler:
    """Owns the queues of waiting and running requests and moves requests between them."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, rows: BatchRows) -> None:
        self.limits = limits
        self.pool = pool
        self.rows = rows
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._num_plans_in_flight = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_plans_in_flight(self) -> int:
        return self._num_plans_in_flight

    def requests(self) -> Iterator[Request]:
        """Every unfinished request."""
        yield from self._running
        yield from self._waiting

    def add(self, request: Request) -> None:
        """Queue a request in order of arrival."""
        insort(self._waiting, request, key=lambda waiting: waiting.number)

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the next step's work and allocate its blocks; empty when there is none now.

        The requests returned count as in flight until `step_done`.
        """
        idle = [request for request in self._running if not request.in_flight]
        max_rows = self._max_rows(len(idle))
        if max_rows == 0:
            return []
        scheduled: list[ScheduledRequest] = []
        preempted: set[int] = set()
        if self._schedule_running(idle[:max_rows], scheduled, preempted):
            self._admit_waiting(max_rows, scheduled)
        for entry in scheduled:
            entry.request.in_flight = True
        if scheduled:
            self._num_plans_in_flight += 1
        return scheduled

    def step_done(self, scheduled: list[ScheduledRequest]) -> None:
        """The step's result has come, or its plan was never sent: its requests are idle again."""
        self._num_plans_in_flight -= 1
        for entry in scheduled:
            entry.request.in_flight = False

    def computed(self, request: Request) -> None:
        """The request's KV advanced: full blocks become available to other requests."""
        full = request.num_computed_tokens // self.pool.block_size * self.pool.block_size
        if full:
            tokens = request.ledger.tokens[:full]
            self.pool.cache(request.block_ids, tokens, request.asked.cache_salt)

    def finish(self, request: Request) -> None:
        """Take a request out for good and release what it holds. It must not be in flight."""
        assert not request.in_flight
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._release(request)
        elif request.state is RequestState.WAITING:
            self._waiting.remove(request)
        request.state = RequestState.FINISHED

    def restart(self) -> None:
        """The KV is lost: drop the prefix cache and queue every request to be recomputed from its
        ledger. Plans in flight will never be answered."""
        self._num_plans_in_flight = 0
        for request in list(self._running):
            request.in_flight = False
            self._to_waiting(request)
        self.pool.drop_cache()

    def _max_rows(self, num_idle: int) -> int:
        """How many requests the next plan may hold; 0 when no plan should be sent now.

        Stages stay evenly loaded when each plan in flight holds an equal share of the requests.
        The one plan beyond the number of stages is worth sending only with a full share: a small
        one would read all the weights for a few rows that could ride along with the next.
        """
        limits = self.limits
        if self._num_plans_in_flight >= limits.max_plans_in_flight:
            return 0
        num_admissible = self._num_admissible()
        share = -(-(len(self._running) + num_admissible) // limits.num_stages)
        if self._num_plans_in_flight >= limits.num_stages and num_idle + num_admissible < share:
            return 0
        return share

    def _num_admissible(self) -> int:
        """How many of the waiting requests, in order, rows and blocks suffice for now. Only the
        first one's cached prefix is looked up, or none might ever seem to fit."""
        room = self.limits.max_num_seqs - len(self._running)
        num_free = self.pool.num_free_blocks
        for index, request in enumerate(self._waiting[:room]):
            num_free -= self._num_blocks(request.num_tokens)
            if num_free < 0:
                return index or int(self._fits(request, self._find_prefix(request)))
        return min(room, len(self._waiting))

    def _fits(self, request: Request, prefix: Sequence[int]) -> bool:
        """Whether there is room for the whole request as it stands, or it would soon be preempted
        again, besides the cached `prefix` that it shares."""
        num_blocks = self._num_blocks(request.num_tokens) - len(prefix)
        return num_blocks <= self.pool.num_free_blocks - self.pool.num_free_among(prefix)

    def _schedule_running(
        self, idle: list[Request], scheduled: list[ScheduledRequest], preempted: set[int]
    ) -> bool:
        """Arrival order; decodes come before chunks, and chunks keep a quarter of the budget.

        Returns whether blocks sufficed, so that newcomers may be admitted: nobody may overtake an
        earlier request by taking the blocks it waits for.
        """
        budget = self.limits.max_num_batched_tokens
        num_decodes = sum(request.num_uncomputed_tokens == 1 for request in idle)
        chunk_budget = max(budget - num_decodes, budget // 4, 1)
        for request in idle:
            if request.number in preempted:
                continue
            uncomputed = request.num_uncomputed_tokens
            num_tokens = min(budget, 1 if uncomputed == 1 else min(uncomputed, chunk_budget))
            if num_tokens == 0:
                continue
            if not self._make_room(request, num_tokens, preempted):
                return False
            scheduled.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
            if uncomputed != 1:
                chunk_budget -= num_tokens
        return not preempted

    def _admit_waiting(self, max_rows: int, scheduled: list[ScheduledRequest]) -> None:
        budget = self.limits.max_num_batched_tokens - sum(
            entry.num_scheduled_tokens for entry in scheduled
        )
        while (
            self._waiting
            and budget > 0
            and len(scheduled) < max_rows
            and len(self._running) < self.limits.max_num_seqs
        ):
            request = self._waiting[0]
            prefix = self._find_prefix(request)
            if not self._fits(request, prefix):
                return
            del self._waiting[0]
            self._start(request, prefix)
            # All blocks at once: those of chunks to come must not be given to a newcomer.
            self._allocate(request, request.num_uncomputed_tokens)
            num_tokens = min(request.num_uncomputed_tokens, budget)
            scheduled.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens

    def _start(self, request: Request, prefix: list[int]) -> None:
        num_cached = len(prefix) * self.pool.block_size
        self.pool.share(prefix)
        request.adopt_cached_prefix(prefix, num_cached)
        if request.ledger.num_output_tokens == 0:
            request.num_cached_tokens = num_cached
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_cached
        request.state = RequestState.RUNNING
        insort(self._running, request, key=lambda running: running.number)
        self.rows.add(request)

    def _find_prefix(self, request: Request) -> list[int]:
        # A cached position has no logits: where prompt logprobs are wanted, it is recomputed.
        if request.wants_prompt_logprobs and not request.prompt_logprobs_complete:
            return []
        return self.pool.find_prefix(request.ledger.tokens, request.asked.cache_salt)

    def _make_room(self, request: Request, num_tokens: int, preempted: set[int]) -> bool:
        """Allocate the request's blocks for this step, preempting younger idle requests. Those
        this step has already scheduled are older."""
        while not self._allocate(request, num_tokens):
            victim = next(
                (
                    candidate
                    for candidate in reversed(self._running)
                    if candidate.number > request.number and not candidate.in_flight
                ),
                None,
            )
            if victim is None:
                return False
            preempted.add(victim.number)
            self.num_preemptions += 1
            self._to_waiting(victim)
        return True

    def _allocate(self, request: Request, num_tokens: int) -> bool:
        needed = self._num_blocks(request.num_computed_tokens + num_tokens)
        num_new = needed - len(request.block_ids)
        if num_new > self.pool.num_free_blocks:
            return False
        if num_new > 0:
            block_ids = self.pool.allocate(num_new, request.number)
            request.block_ids.extend(block_ids)
            self.rows.append_blocks(request, block_ids)
        return True

    def _to_waiting(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.state = RequestState.WAITING
        self.add(request)

    def _release(self, request: Request) -> None:
        self.rows.remove(request)
        self.pool.release(request.forget_kv())

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)
