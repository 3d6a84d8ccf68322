"""From a schedule and the ledgers to a step plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokentight.engine.batch import BatchRows
from tokentight.engine.request import Request
from tokentight.engine.scheduler import ScheduledRequest
from tokentight.pipeline.plan import F32, I32, SamplingPlan, StepPlan


def build_plan(
    scheduled: Sequence[ScheduledRequest],
    rows: BatchRows,
    block_size: int,
    step: int,
    epoch: int,
) -> StepPlan:
    """The self-contained plan of one step, its rows in the order of `scheduled`."""
    requests = [entry.request for entry in scheduled]
    counts = np.array([entry.num_scheduled_tokens for entry in scheduled], dtype=np.int32)
    computed = np.array([request.num_computed_tokens for request in requests], dtype=np.int32)
    query_starts = np.zeros(len(requests) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    context_lens = computed + counts

    token_ids = np.concatenate(
        [
            request.ledger.tokens[first : first + count]
            for request, first, count in zip(requests, computed, counts, strict=True)
        ]
    )
    row_of_token = np.repeat(np.arange(len(requests), dtype=np.int32), counts)
    in_row = np.arange(len(token_ids), dtype=np.int32) - query_starts[row_of_token]
    positions = computed[row_of_token] + in_row

    records = rows.records[rows.rows_of(requests)]
    width = int(-(-context_lens.max() // block_size))
    block_tables = np.ascontiguousarray(records["block_table"][:, :width])
    # A row's allocated blocks may reach past this step; what lies past its context is not sent.
    used = -(-context_lens // block_size)
    block_tables[np.arange(width) >= used[:, None]] = 0
    blocks = block_tables[row_of_token, positions // block_size]
    slots = blocks.astype(np.int64) * block_size + positions % block_size

    sampled_rows = [
        row
        for row, (request, context_len) in enumerate(zip(requests, context_lens, strict=True))
        if context_len == request.num_tokens and request.samples_when_computed
    ]
    scored = _scored_tokens(requests, computed, counts, query_starts)
    return StepPlan(
        step=step,
        epoch=epoch,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        request_numbers=records["request_number"].copy(),
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        scored_token_indices=scored[0],
        scored_targets=scored[1],
        scored_num_logprobs=scored[2],
        sampling=_sampling_plan(
            [requests[row] for row in sampled_rows],
            records[sampled_rows],
            query_starts[1:][sampled_rows] - 1,
        ),
    )


def _scored_tokens(
    requests: Sequence[Request], computed: I32, counts: I32, query_starts: I32
) -> tuple[I32, I32, I32]:
    """Prompt tokens whose logprob this step computes: the hidden state at a prompt position
    scores the prompt token after it."""
    indices: list[I32] = [np.empty(0, np.int32)]
    targets: list[I32] = [np.empty(0, np.int32)]
    wanted: list[I32] = [np.empty(0, np.int32)]
    for row, request in enumerate(requests):
        num_logprobs = request.params.prompt_logprobs
        if num_logprobs is None:
            continue
        first = int(computed[row])
        last = min(first + int(counts[row]), request.ledger.num_prompt_tokens - 1)
        if first < last:
            start = int(query_starts[row])
            indices.append(np.arange(start, start + last - first, dtype=np.int32))
            targets.append(request.ledger.tokens[first + 1 : last + 1])
            wanted.append(np.full(last - first, num_logprobs, dtype=np.int32))
    return np.concatenate(indices), np.concatenate(targets), np.concatenate(wanted)


def _sampling_plan(
    requests: Sequence[Request], records: NDArray[np.void], token_indices: I32
) -> SamplingPlan:
    biases = [request.params.logit_bias for request in requests]
    histories = [
        request.ledger.tokens if request.params.has_penalties else np.empty(0, np.int32)
        for request in requests
    ]
    return SamplingPlan(
        token_indices=token_indices.astype(np.int32),
        temperature=records["temperature"].copy(),
        top_k=records["top_k"].copy(),
        top_p=records["top_p"].copy(),
        min_p=records["min_p"].copy(),
        repetition_penalty=records["repetition_penalty"].copy(),
        presence_penalty=records["presence_penalty"].copy(),
        frequency_penalty=records["frequency_penalty"].copy(),
        seed=records["seed"].copy(),
        choice=records["choice"].copy(),
        num_logprobs=records["num_logprobs"].copy(),
        bias_starts=_starts([len(bias) for bias in biases]),
        bias_token_ids=np.array([token for bias in biases for token in bias], dtype=np.int32),
        bias_values=_float32([value for bias in biases for value in bias.values()]),
        history_starts=_starts([len(history) for history in histories]),
        history_token_ids=np.concatenate([np.empty(0, np.int32), *histories]),
        history_prompt_lens=np.array(
            [
                request.ledger.num_prompt_tokens if request.params.has_penalties else 0
                for request in requests
            ],
            dtype=np.int32,
        ),
    )


def _starts(lengths: Sequence[int]) -> I32:
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _float32(values: Sequence[float]) -> F32:
    return np.array(values, dtype=np.float32)
