"""The always-on audit: a plan is compared with the ledgers before it is sent.

The audit derives everything anew from the requests and the block pool and never looks at the
driver's batch rows, from which the plan was built: what those got wrong is what it is for. A
violation stops the request it belongs to with an error; a damaged plan is never served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokentight.engine.batch import NO_BLOCK
from tokentight.engine.block_pool import NO_OWNER, BlockPool
from tokentight.engine.sampling_audit import malformed_sampling, wrong_sampling
from tokentight.engine.scheduler import ScheduledRequest
from tokentight.pipeline.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Violation:
    """What the audit found wrong with one request's part of a plan."""

    request_number: int
    what: str


def audit(
    plan: StepPlan, scheduled: Sequence[ScheduledRequest], pool: BlockPool
) -> list[Violation]:
    """Compare `plan` with the ledgers and the block pool. Empty when it is sound.

    Checked for every request: token ids and positions against the ledger, contiguous from the
    computed count; the block table against the request's blocks; slots written against blocks
    that this request alone may write; that no block it uses is free or may be written by another;
    the token that is sampled, with its parameters; the prompt tokens that are scored. Of the
    plan's fields only `step` and `epoch` have nothing here to be compared with: the stages and
    the driver check them.
    """
    malformed = _malformed(plan, scheduled) or malformed_sampling(plan)
    if malformed is not None:
        return [Violation(entry.request.number, malformed) for entry in scheduled]
    sampling, scoring = wrong_sampling(plan, scheduled), _wrong_scoring(plan, scheduled)
    foreign = _rows_with_foreign_blocks(plan, scheduled, pool)
    violations: list[Violation] = []
    for row, entry in enumerate(scheduled):
        what = (
            _wrong_tokens(plan, row, entry)
            or _wrong_table(plan, row, entry, pool)
            or ("a block it uses is also free, or another request's" if foreign[row] else None)
            or _wrong_writes(plan, row, entry, pool)
            or sampling.get(row)
            or scoring.get(row)
        )
        if what is not None:
            violations.append(Violation(entry.request.number, what))
    return violations


def _malformed(plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> str | None:
    counts = np.array([entry.num_scheduled_tokens for entry in scheduled])
    num_rows = len(scheduled)
    if (
        not plan.num_rows == len(plan.context_lens) == len(plan.block_tables) == num_rows
        or not np.array_equal(np.diff(plan.query_starts), counts)
        or plan.query_starts[0] != 0
    ):
        return "the plan's rows are not those that were scheduled"
    total = int(counts.sum())
    if not len(plan.token_ids) == len(plan.positions) == len(plan.slots) == total:
        return f"the plan holds {len(plan.token_ids)} tokens, {total} were scheduled"
    num_scored = sum(_num_scored(entry) for entry in scheduled)
    scored = (plan.scored_token_indices, plan.scored_targets, plan.scored_num_logprobs)
    if any(len(column) != num_scored for column in scored):
        return f"the plan scores {len(plan.scored_targets)} prompt tokens, not {num_scored}"
    return None


def _wrong_tokens(plan: StepPlan, row: int, entry: ScheduledRequest) -> str | None:
    request, count = entry.request, entry.num_scheduled_tokens
    if plan.request_numbers[row] != request.number:
        return f"row {row} is labelled request {plan.request_numbers[row]}"
    first = request.num_computed_tokens
    if plan.context_lens[row] != first + count:
        return f"context length {plan.context_lens[row]} is not {first} computed + {count}"
    start = int(plan.query_starts[row])
    if count == 1:  # a decode: the common case, without making arrays
        position, token = int(plan.positions[start]), int(plan.token_ids[start])
        if position != first:
            return f"position {position} stands where {first} belongs"
        if token != request.ledger.tokens[first]:
            return f"token id {token} at position {first} is not the ledger's"
        return None
    positions = plan.positions[start : start + count]
    expected = np.arange(first, first + count)
    if not np.array_equal(positions, expected):
        at = int(np.argmax(positions != expected))
        return f"position {positions[at]} stands where {expected[at]} belongs"
    tokens = plan.token_ids[start : start + count]
    ledger = request.ledger.tokens[first : first + count]
    if not np.array_equal(tokens, ledger):
        at = int(np.argmax(tokens != ledger))
        return f"token id {tokens[at]} at position {first + at} is not the ledger's {ledger[at]}"
    return None


def _wrong_table(plan: StepPlan, row: int, entry: ScheduledRequest, pool: BlockPool) -> str | None:
    context_len = entry.request.num_computed_tokens + entry.num_scheduled_tokens
    used = -(-context_len // pool.block_size)
    block_ids = entry.request.block_ids[:used]
    if len(block_ids) < used:
        return f"{context_len} positions do not fit in {len(block_ids)} blocks"
    # As bytes: tables are long and mostly equal.
    if plan.block_tables[row, :used].tobytes() != block_ids.tobytes():
        return "the block table is not that of the request"
    return None


def _wrong_writes(plan: StepPlan, row: int, entry: ScheduledRequest, pool: BlockPool) -> str | None:
    request, count, size = entry.request, entry.num_scheduled_tokens, pool.block_size
    first = request.num_computed_tokens
    block_ids = request.block_ids[: -(-(first + count) // size)]
    start = int(plan.query_starts[row])
    for offset, slot in enumerate(plan.slots[start : start + count].tolist()):
        position = first + offset
        if slot != block_ids[position // size] * size + position % size:
            return f"position {position} would be written to slot {slot} of another block"
    for block_id in block_ids[first // size :]:
        if pool.owner(block_id) != request.number or pool.ref_count(block_id) != 1:
            return f"block {block_id} would be written but is not this request's alone"
    return None


def _rows_with_foreign_blocks(
    plan: StepPlan, scheduled: Sequence[ScheduledRequest], pool: BlockPool
) -> NDArray[np.bool_]:
    """Rows that use a block that is free or that another request may write, or whose table is not
    empty past its end. `[R]`."""
    numbers = np.array([entry.request.number for entry in scheduled])
    context_lens = [
        entry.request.num_computed_tokens + entry.num_scheduled_tokens for entry in scheduled
    ]
    used = -(-np.array(context_lens) // pool.block_size)
    tables = plan.block_tables
    in_use = np.arange(tables.shape[1]) < used[:, None]
    # An id outside the pool is another block than the request's, which is found by comparison.
    block_ids = np.where(in_use, tables, 0).clip(0, pool.num_blocks - 1)
    owners = pool.owners(block_ids)
    foreign = (owners != NO_OWNER) & (owners != numbers[:, None])
    foreign |= pool.ref_counts(block_ids) == 0
    rows: NDArray[np.bool_] = np.where(in_use, foreign, tables != NO_BLOCK).any(axis=1)
    return rows


def _num_scored(entry: ScheduledRequest) -> int:
    """How many prompt tokens the step scores: each by the position before it."""
    request = entry.request
    if not request.wants_prompt_logprobs:
        return 0
    left = request.ledger.num_prompt_tokens - 1 - request.num_computed_tokens
    return max(0, min(entry.num_scheduled_tokens, left))


def _wrong_scoring(plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> dict[int, str]:
    """The scored tokens of all rows stand one after another."""
    wrong: dict[int, str] = {}
    end = 0
    for row, entry in enumerate(scheduled):
        count = _num_scored(entry)
        if count == 0:
            continue
        request, first = entry.request, entry.request.num_computed_tokens
        scored = slice(end, end + count)
        end += count
        start = int(plan.query_starts[row])
        if not np.array_equal(plan.scored_token_indices[scored], np.arange(start, start + count)):
            wrong[row] = "prompt positions would be scored out of place"
        elif not np.array_equal(
            plan.scored_targets[scored], request.ledger.tokens[first + 1 : first + count + 1]
        ):
            wrong[row] = "the scored prompt tokens are not the ledger's"
        elif (plan.scored_num_logprobs[scored] != request.params.prompt_logprobs).any():
            wrong[row] = "not as many prompt logprobs would be told as were asked for"
    return wrong
