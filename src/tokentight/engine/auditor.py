"""The always-on audit: a plan is compared with the ledgers before it is sent.

The audit derives everything anew from the requests and the block pool and never looks at the
driver's batch rows, from which the plan was built: what those got wrong is what it is for. A
violation stops the request it belongs to with an error; a damaged plan is never served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokentight.engine.block_pool import BlockPool
from tokentight.engine.request import Request
from tokentight.engine.scheduler import ScheduledRequest
from tokentight.pipeline.plan import I32, NO_LOGPROBS, StepPlan


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
    that this request alone may write; that no block written or read is free; the token that is
    sampled, with its parameters; the prompt tokens that are scored.
    """
    shape = _shape_violation(plan, scheduled)
    if shape is not None:
        return [Violation(entry.request.number, shape) for entry in scheduled]
    violations: list[Violation] = []
    writers: dict[int, int] = {}
    sampled = _sampled_rows(plan)
    num_scored = 0
    for row, entry in enumerate(scheduled):
        request = entry.request
        what = (
            _wrong_tokens(plan, row, entry)
            or _wrong_blocks(plan, row, entry, pool, writers)
            or _wrong_sampling(plan, sampled.get(row), request, int(plan.context_lens[row]))
        )
        if what is None:
            num_scored, what = _wrong_scoring(plan, row, entry, num_scored)
        if what is not None:
            violations.append(Violation(request.number, what))
    if not violations and num_scored != len(plan.scored_targets):
        violations = [Violation(e.request.number, "stray scored tokens") for e in scheduled]
    return violations


def _shape_violation(plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> str | None:
    counts = np.array([entry.num_scheduled_tokens for entry in scheduled])
    if plan.num_rows != len(scheduled) or not np.array_equal(np.diff(plan.query_starts), counts):
        return "the plan's rows are not those that were scheduled"
    total = int(counts.sum())
    if not len(plan.token_ids) == len(plan.positions) == len(plan.slots) == total:
        return f"the plan holds {len(plan.token_ids)} tokens, {total} were scheduled"
    if plan.query_starts[0] != 0:
        return "the first row does not begin at the first token"
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


def _wrong_blocks(
    plan: StepPlan, row: int, entry: ScheduledRequest, pool: BlockPool, writers: dict[int, int]
) -> str | None:
    request, count, size = entry.request, entry.num_scheduled_tokens, pool.block_size
    first = request.num_computed_tokens
    used = -(-(first + count) // size)
    block_ids = request.block_ids[:used]
    if len(block_ids) < used:
        return f"{first + count} positions do not fit in {len(block_ids)} blocks"
    table = plan.block_tables[row].tolist()
    if table[:used] != block_ids:
        return "the block table is not that of the request"
    if any(pool.is_free(block_id) for block_id in block_ids):
        return "a block in use is also free"
    start = int(plan.query_starts[row])
    slots = plan.slots[start : start + count].tolist()
    for offset, slot in enumerate(slots):
        position = first + offset
        block_id = block_ids[position // size]
        if slot != block_id * size + position % size:
            return f"position {position} would be written to slot {slot} of another block"
    for block_id in block_ids[first // size :]:
        if pool.owner(block_id) != request.number or pool.ref_count(block_id) != 1:
            return f"block {block_id} would be written but is not this request's alone"
        if writers.setdefault(block_id, request.number) != request.number:
            return f"block {block_id} would be written by request {writers[block_id]} too"
    return None


def _sampled_rows(plan: StepPlan) -> dict[int, int]:
    """Row to its index in the sampling plan."""
    token_indices = plan.sampling.token_indices
    rows = np.searchsorted(plan.query_starts, token_indices, side="right") - 1
    return {int(row): index for index, row in enumerate(rows)}


def _wrong_sampling(
    plan: StepPlan, index: int | None, request: Request, context_len: int
) -> str | None:
    expected = context_len == request.num_tokens and request.samples_when_computed
    if (index is not None) != expected:
        return "it would be sampled too early" if index is not None else "it would not be sampled"
    if index is None:
        return None
    sampling, params = plan.sampling, request.params
    at = int(sampling.token_indices[index])
    if plan.positions[at] != request.num_tokens - 1:
        return "the token to be sampled is not the one after the last"
    num_logprobs = NO_LOGPROBS if params.logprobs is None else params.logprobs
    if (
        sampling.seed[index] != request.seed
        or sampling.choice[index] != request.asked.choice
        or sampling.top_k[index] != params.top_k
        or sampling.num_logprobs[index] != num_logprobs
        or sampling.temperature[index] != np.float32(params.temperature)
        or sampling.top_p[index] != np.float32(params.top_p)
        or sampling.min_p[index] != np.float32(params.min_p)
        or sampling.repetition_penalty[index] != np.float32(params.repetition_penalty)
        or sampling.presence_penalty[index] != np.float32(params.presence_penalty)
        or sampling.frequency_penalty[index] != np.float32(params.frequency_penalty)
    ):
        return "its sampling parameters are not those that were asked for"
    bias = slice(sampling.bias_starts[index], sampling.bias_starts[index + 1])
    wanted_bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
    if sampling.bias_token_ids[bias].tolist() != list(params.logit_bias) or not np.array_equal(
        sampling.bias_values[bias], wanted_bias
    ):
        return "its logit bias is not the one that was asked for"
    history = _ragged(sampling.history_token_ids, sampling.history_starts, index)
    wanted = request.ledger.tokens if params.has_penalties else request.ledger.tokens[:0]
    if not np.array_equal(history, wanted):
        return "its token history is not the ledger's"
    return None


def _wrong_scoring(
    plan: StepPlan, row: int, entry: ScheduledRequest, num_scored: int
) -> tuple[int, str | None]:
    """The scored tokens of all rows stand one after another; `num_scored` came before."""
    request = entry.request
    if not request.wants_prompt_logprobs:
        return num_scored, None
    first = request.num_computed_tokens
    last = min(first + entry.num_scheduled_tokens, request.ledger.num_prompt_tokens - 1)
    if first >= last:
        return num_scored, None
    end = num_scored + last - first
    indices = plan.scored_token_indices[num_scored:end]
    start = int(plan.query_starts[row])
    if not np.array_equal(indices, np.arange(start, start + last - first)):
        return end, "prompt positions would be scored out of place"
    if not np.array_equal(
        plan.scored_targets[num_scored:end], request.ledger.tokens[first + 1 : last + 1]
    ):
        return end, "the scored prompt tokens are not the ledger's"
    return end, None


def _ragged(values: I32, starts: I32, index: int) -> I32:
    return values[starts[index] : starts[index + 1]]
