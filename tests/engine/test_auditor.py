"""The auditor stops every driver-side corruption before it is sent, and only the request hit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from engine_driver import Load, Run, Sizes, alone

from tokentight.engine import core as core_module
from tokentight.engine.auditor import audit
from tokentight.engine.batch import BatchRows
from tokentight.engine.block_pool import BlockPool
from tokentight.engine.outputs import FinishReason
from tokentight.engine.planner import build_plan
from tokentight.engine.request import GenerationRequest, Request
from tokentight.engine.scheduler import ScheduledRequest, Scheduler, SchedulerLimits
from tokentight.pipeline.plan import StepPlan
from tokentight.sampling.params import SamplingParams

BLOCK_SIZE = 4
Corruption = Callable[[StepPlan], StepPlan]


def a_step() -> tuple[StepPlan, list[ScheduledRequest], BlockPool]:
    """Three requests in one step, all sampled: a decode, a prefill, a prefill that is scored."""
    pool = BlockPool(32, BLOCK_SIZE, enable_prefix_caching=True)
    rows = BatchRows(8, 16)
    scheduler = Scheduler(SchedulerLimits(8, 20, 1), pool, rows)
    wanted = [
        SamplingParams(temperature=0.5, repetition_penalty=1.5, logit_bias={3: 1.0}),
        SamplingParams(logprobs=2),
        SamplingParams(prompt_logprobs=1),
    ]
    requests = [
        Request(GenerationRequest(str(i), tuple(range(10 * i, 10 * i + 9)), params), i, i, 40)
        for i, params in enumerate(wanted)
    ]
    scheduler.add(requests[0])
    first = scheduler.schedule()
    scheduler.step_done(first)
    requests[0].advance(9)
    scheduler.computed(requests[0])
    requests[0].ledger.append(77)
    scheduler.add(requests[1])
    scheduler.add(requests[2])
    scheduled = scheduler.schedule()
    assert [entry.num_scheduled_tokens for entry in scheduled] == [1, 9, 9]
    return build_plan(scheduled, rows, BLOCK_SIZE, 1, 0), scheduled, pool


def changed(array: np.ndarray, index: object, value: object) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


def in_sampling(name: str, index: object, value: object) -> Corruption:
    def corrupt(plan: StepPlan) -> StepPlan:
        array = changed(getattr(plan.sampling, name), index, value)
        return replace(plan, sampling=replace(plan.sampling, **{name: array}))

    return corrupt


def in_plan(name: str, index: object, value: object) -> Corruption:
    return lambda plan: replace(plan, **{name: changed(getattr(plan, name), index, value)})


def swap_tables(plan: StepPlan) -> StepPlan:
    tables = plan.block_tables.copy()
    tables[[1, 2]] = tables[[2, 1]]
    return replace(plan, block_tables=tables)


def write_where_row_2_writes(plan: StepPlan) -> StepPlan:
    return replace(plan, slots=changed(plan.slots, 3, plan.slots[12]))


def with_sampling_rows(plan: StepPlan, rows: list[int]) -> StepPlan:
    """The plan with only these rows of its sampling plan (they may repeat)."""
    sampling = plan.sampling
    ragged = {}
    for name in ("bias_token_ids", "bias_values", "history_token_ids"):
        starts = getattr(sampling, f"{name.split('_')[0]}_starts")
        parts = [getattr(sampling, name)[starts[row] : starts[row + 1]] for row in rows]
        ragged[name] = np.concatenate(parts)
        lengths = [len(part) for part in parts]
        ragged[f"{name.split('_')[0]}_starts"] = np.cumsum([0, *lengths], dtype=np.int32)
    columns = {
        field.name: getattr(sampling, field.name)[rows]
        for field in fields(sampling)
        if field.name not in ragged
    }
    return replace(plan, sampling=replace(sampling, **columns, **ragged))


def drop_sampled_row(plan: StepPlan) -> StepPlan:
    return with_sampling_rows(plan, [0, 2])


def sample_row_twice(plan: StepPlan) -> StepPlan:
    return with_sampling_rows(plan, [0, 1, 1, 2])


def without_last(name: str) -> Corruption:
    return lambda plan: replace(plan, **{name: getattr(plan, name)[:-1]})


def test_a_sound_plan_passes() -> None:
    plan, scheduled, pool = a_step()
    assert audit(plan, scheduled, pool) == []


@pytest.mark.parametrize(
    ("corrupt", "hit", "what"),
    [
        (in_plan("token_ids", 0, 5), {0}, "token id 5"),
        (in_plan("token_ids", 4, 5), {1}, "token id 5"),
        (in_plan("positions", 0, 8), {0}, "position 8"),
        (in_plan("positions", 5, 9), {1}, "position 9 stands where 4 belongs"),
        (in_plan("context_lens", 1, 8), {1}, "context length"),
        (in_plan("request_numbers", 1, 2), {1}, "labelled request 2"),
        (in_plan("slots", 3, 0), {1}, "slot 0"),
        (write_where_row_2_writes, {1}, "of another block"),
        (in_plan("block_tables", (1, 0), 0), {1}, "block table"),
        (swap_tables, {1, 2}, "block table"),
        (in_plan("scored_targets", 2, 3), {2}, "scored prompt tokens"),
        (in_plan("scored_token_indices", 2, 3), {2}, "scored out of place"),
        (in_sampling("token_indices", 1, 4), {1}, "not the one after the last"),
        (in_sampling("seed", 0, 9), {0}, "parameters"),
        (in_sampling("temperature", 0, 0), {0}, "parameters"),
        (in_sampling("num_logprobs", 1, 0), {1}, "parameters"),
        (in_sampling("bias_values", 0, 2.0), {0}, "logit bias"),
        (in_sampling("history_token_ids", 4, 9), {0}, "token history"),
        (in_sampling("history_prompt_lens", 0, 8), {0}, "said to hold 8 prompt tokens"),
        (in_sampling("history_prompt_lens", 1, 8), {1}, "history was not asked for"),
        (in_sampling("bias_token_ids", 0, 4), {0}, "logit bias"),
        (in_sampling("choice", 1, 1), {1}, "parameters"),
        (in_sampling("top_k", 1, 1), {1}, "parameters"),
        (in_sampling("top_p", 1, 0.5), {1}, "parameters"),
        (in_sampling("min_p", 1, 0.5), {1}, "parameters"),
        (in_sampling("repetition_penalty", 0, 1), {0}, "parameters"),
        (in_sampling("presence_penalty", 0, 1), {0}, "parameters"),
        (in_sampling("frequency_penalty", 0, 1), {0}, "parameters"),
        (in_plan("scored_num_logprobs", 2, 0), {2}, "prompt logprobs"),
        (in_plan("block_tables", (0, 0), 31), {0}, "block table"),
        (in_plan("block_tables", (0, 0), -1), {0}, "block table"),
        (in_plan("block_tables", (0, 0), 99), {0}, "block table"),
        (drop_sampled_row, {1}, "would not be sampled"),
    ],
)
def test_every_planted_corruption_is_caught(corrupt: Corruption, hit: set[int], what: str) -> None:
    plan, scheduled, pool = a_step()
    violations = audit(corrupt(plan), scheduled, pool)
    assert {violation.request_number for violation in violations} == hit
    assert what in violations[0].what


@pytest.mark.parametrize(
    ("corrupt", "what"),
    [
        (without_last("token_ids"), "the plan holds 18 tokens"),
        (without_last("context_lens"), "rows"),
        (without_last("block_tables"), "rows"),
        (without_last("scored_targets"), "scores 7 prompt tokens, not 8"),
        (without_last("scored_num_logprobs"), "prompt tokens"),
        (in_plan("query_starts", 1, 2), "rows"),
        (in_sampling("bias_starts", 2, 0), "fit together"),
        (in_sampling("history_starts", 1, 12), "fit together"),
        (in_sampling("token_indices", 1, 19), "outside the plan"),
        (in_sampling("token_indices", 0, -1), "outside the plan"),
        (sample_row_twice, "sampled twice"),
    ],
)
def test_a_plan_that_does_not_add_up_is_condemned_whole(corrupt: Corruption, what: str) -> None:
    """It tells nothing reliable about any of its rows."""
    plan, scheduled, pool = a_step()
    violations = audit(corrupt(plan), scheduled, pool)
    assert len(violations) == 3
    assert what in violations[0].what


def test_every_field_of_a_plan_is_audited() -> None:
    """No array of a plan can be changed unnoticed, so a new field cannot be forgotten."""
    plan, scheduled, pool = a_step()
    for owner, corruption in ((plan, in_plan), (plan.sampling, in_sampling)):
        for field in fields(owner):
            array = getattr(owner, field.name)
            if isinstance(array, np.ndarray):
                for index in np.ndindex(array.shape):
                    corrupted = corruption(field.name, index, array[index] + 1)(plan)
                    assert audit(corrupted, scheduled, pool), f"{field.name}{index}"


def test_a_token_sampled_too_early_is_caught() -> None:
    """As after a chunk that ends before the request's last token."""
    plan, scheduled, pool = a_step()
    scheduled[2].request.ledger.append(5)
    violations = audit(plan, scheduled, pool)
    assert [v.request_number for v in violations] == [scheduled[2].request.number]
    assert "sampled too early" in violations[0].what


def test_reading_a_block_that_another_request_may_write_is_caught() -> None:
    """Even where the request's own list names it, as a wrong prefix lookup would make it."""
    plan, scheduled, pool = a_step()
    decode, other = scheduled[0].request, scheduled[1].request
    decode.block_ids[0] = other.block_ids[0]
    corrupted = replace(plan, block_tables=changed(plan.block_tables, (0, 0), other.block_ids[0]))
    violations = audit(corrupted, scheduled, pool)
    assert [v.request_number for v in violations] == [decode.number]
    assert "another request's" in violations[0].what


def test_a_block_used_by_two_requests_is_caught() -> None:
    plan, scheduled, pool = a_step()
    thief, owner = scheduled[1].request, scheduled[2].request
    thief.block_ids[1] = owner.block_ids[1]
    tables = changed(plan.block_tables, (1, 1), owner.block_ids[1])
    positions = plan.positions[1:10]
    slots = tables[1][positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    corrupted = replace(plan, block_tables=tables, slots=changed(plan.slots, slice(1, 10), slots))
    violations = audit(corrupted, scheduled, pool)
    assert [v.request_number for v in violations] == [thief.number]
    assert "another request's" in violations[0].what


def test_a_block_both_used_and_free_is_caught() -> None:
    plan, scheduled, pool = a_step()
    pool.release([scheduled[1].request.block_ids[0]])
    violations = audit(plan, scheduled, pool)
    assert [v.request_number for v in violations] == [scheduled[1].request.number]
    assert "also free" in violations[0].what


def test_writing_to_a_cached_block_is_caught() -> None:
    """The KV of a cached block may be read by others at any time."""
    plan, scheduled, pool = a_step()
    request = scheduled[1].request
    pool.cache(request.block_ids, request.ledger.tokens[:4], "")
    violations = audit(plan, scheduled, pool)
    assert [v.request_number for v in violations] == [request.number]


def test_a_row_moved_short_is_stopped_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The published fault, planted in the driver: compaction copies only the first part of a
    row (once), so the tail of its former occupant stands in the moved request's block table."""

    def remove_moving_short(rows: BatchRows, request: Request) -> None:
        row = rows._row_of.pop(request.number)
        last = len(rows._row_of)
        if row != last:
            occupant = rows.records[row]["block_table"].copy()
            rows.records[row] = rows.records[last]
            if request.number == 0:
                rows.records[row]["block_table"][2:] = occupant[2:]
            rows._row_of[int(rows.records[row]["request_number"])] = row

    monkeypatch.setattr(BatchRows, "remove", remove_moving_short)
    run = Run(Sizes(max_num_batched_tokens=64))
    loads = [
        Load(tuple([7] * 20), SamplingParams(max_tokens=1)),
        Load(tuple([1] * 20), SamplingParams(max_tokens=10)),
        Load(tuple([2] * 20), SamplingParams(max_tokens=10)),
    ]
    numbers = run.run(loads)
    moved, sound = run.outputs[numbers[2]], run.outputs[numbers[1]]
    assert moved.finish_reason is FinishReason.ERROR
    assert "audit: the block table" in (moved.error or "")
    assert list(sound.token_ids) == alone(loads[1])[0]
    assert run.core.stats().audit_violations == 1
    served = alone(loads[2])[0]
    assert list(moved.token_ids) == served[: len(moved.token_ids)], "a damaged answer was served"


def test_the_core_audits_every_plan_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    audited: list[int] = []

    def counting(plan: StepPlan, scheduled: list[ScheduledRequest], pool: BlockPool) -> list:
        audited.append(plan.step)
        return audit(plan, scheduled, pool)

    monkeypatch.setattr(core_module, "audit", counting)
    run = Run(Sizes())
    run.run([Load((1, 2, 3), SamplingParams(max_tokens=5))])
    assert audited == [plan.step for plan in run.pipeline.plans]
