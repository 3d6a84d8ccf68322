"""Who goes first, who yields, and what is kept for whom."""

from __future__ import annotations

from tokentight.engine.batch import BatchRows
from tokentight.engine.block_pool import BlockPool
from tokentight.engine.request import GenerationRequest, Request, RequestState
from tokentight.engine.scheduler import ScheduledRequest, Scheduler, SchedulerLimits
from tokentight.sampling.params import SamplingParams

BLOCK_SIZE = 4
ASKED = SamplingParams(max_tokens=40)


def a_scheduler(num_blocks: int, budget: int, num_stages: int = 1) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
    return Scheduler(SchedulerLimits(8, budget, num_stages), pool, BatchRows(8, 32))


def a_request(number: int, num_tokens: int) -> Request:
    prompt = tuple([number] * num_tokens)
    return Request(GenerationRequest(str(number), prompt, ASKED), number, 0, num_tokens + 40)


def apply(scheduler: Scheduler, scheduled: list[ScheduledRequest]) -> dict[int, int]:
    """What a step's result does to the books; returns the tokens it computed by request."""
    scheduler.step_done(scheduled)
    for entry in scheduled:
        entry.request.advance(entry.num_scheduled_tokens)
        scheduler.computed(entry.request)
        if entry.request.num_uncomputed_tokens == 0:
            entry.request.ledger.append(9)
    return {entry.request.number: entry.num_scheduled_tokens for entry in scheduled}


def step(scheduler: Scheduler) -> dict[int, int]:
    return apply(scheduler, scheduler.schedule())


def test_every_decode_has_its_token_beside_the_chunks_of_an_older_request() -> None:
    """As when a preempted request is recomputed beside younger ones that went on."""
    scheduler = a_scheduler(num_blocks=64, budget=8)
    scheduler.add(a_request(1, 3))
    scheduler.add(a_request(2, 3))
    assert step(scheduler) == {1: 3, 2: 3}
    scheduler.add(a_request(0, 40))
    assert step(scheduler) == {0: 6, 1: 1, 2: 1}
    assert step(scheduler) == {0: 6, 1: 1, 2: 1}


def test_chunks_keep_a_quarter_of_the_budget_however_many_decodes_there_are() -> None:
    scheduler = a_scheduler(num_blocks=64, budget=8)
    for number in range(1, 8):
        scheduler.add(a_request(number, 1))
    assert step(scheduler) == dict.fromkeys(range(1, 8), 1)
    scheduler.add(a_request(0, 40))
    assert step(scheduler)[0] == 1
    assert step(scheduler) == {0: 2, **dict.fromkeys(range(1, 7), 1)}


def test_a_preempted_request_goes_before_those_that_came_after_it() -> None:
    scheduler = a_scheduler(num_blocks=3, budget=16)
    requests = [a_request(number, 4) for number in range(3)]
    for request in requests:
        scheduler.add(request)
    assert step(scheduler) == {0: 4, 1: 4, 2: 4}
    scheduler.add(a_request(3, 1))
    # Each needs a second block now: the youngest yields, and nobody takes its place.
    assert step(scheduler) == {0: 1}
    states = [request.state for request in requests]
    assert states == [RequestState.RUNNING, RequestState.RUNNING, RequestState.WAITING]
    assert requests[2].num_computed_tokens == 0
    assert requests[2].num_tokens == 5
    scheduler.finish(requests[0])
    assert step(scheduler) == {1: 1}
    scheduler.finish(requests[1])
    assert step(scheduler) == {2: 5, 3: 1}


def test_a_request_in_flight_is_never_preempted() -> None:
    """Its step writes to its blocks, whoever would have them next."""
    scheduler = a_scheduler(num_blocks=4, budget=16, num_stages=2)
    requests = [a_request(number, 4) for number in range(4)]
    for request in requests:
        scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [entry.request.number for entry in first + second] == [0, 1, 2, 3]
    apply(scheduler, first)
    assert [entry.request.number for entry in scheduler.schedule()] == [0]
    assert [request.state for request in requests[1:]] == [
        RequestState.WAITING,
        RequestState.RUNNING,
        RequestState.RUNNING,
    ]


def test_the_plan_beyond_the_stages_is_sent_only_with_a_full_share() -> None:
    scheduler = a_scheduler(num_blocks=64, budget=64, num_stages=2)
    for number in range(4):
        scheduler.add(a_request(number, 4))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (len(first), len(second)) == (2, 2)
    scheduler.finish(apply_and_first(scheduler, first))
    third = scheduler.schedule()
    assert len(third) == 1
    scheduler.add(a_request(4, 4))
    assert scheduler.schedule() == [], "one request of a share of two"
    scheduler.add(a_request(5, 4))
    scheduler.add(a_request(6, 4))
    assert len(scheduler.schedule()) == 3


def apply_and_first(scheduler: Scheduler, scheduled: list[ScheduledRequest]) -> Request:
    apply(scheduler, scheduled)
    return scheduled[0].request


def test_cached_tokens_are_those_found_at_arrival() -> None:
    """What a recomputation finds in the cache is the request's own and saves the caller nothing."""
    pool = BlockPool(64, BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = Scheduler(SchedulerLimits(8, 64, 1), pool, BatchRows(8, 32))
    request = a_request(0, 9)
    scheduler.add(request)
    step(scheduler)
    scheduler._to_waiting(request)
    assert step(scheduler) == {0: 2}, "its own blocks are found again"
    assert request.num_cached_tokens == 0
    assert scheduler.prefix_cache_hits == 0
