"""The part of the audit that looks at what is sampled, and how.

Everything is derived anew from the requests, by columns, since this runs at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentight.engine.request import Request
from tokentight.engine.scheduler import ScheduledRequest
from tokentight.pipeline.plan import I32, NO_LOGPROBS, SamplingPlan, StepPlan


def malformed_sampling(plan: StepPlan) -> str | None:
    """Why the sampling plan tells nothing reliable about any row, None if it does."""
    sampling = plan.sampling
    indices = sampling.token_indices
    num_sampled = len(indices)
    if len(set(plan.rows_of(indices))) != num_sampled:
        return "a row would be sampled twice"
    if num_sampled and not 0 <= indices.min() <= indices.max() < plan.num_scheduled_tokens:
        return "a token outside the plan would be sampled"
    columns = (*_parameters(sampling).values(), sampling.history_prompt_lens)
    ragged = (
        _fits_together(sampling.bias_starts, num_sampled, len(sampling.bias_token_ids)),
        _fits_together(sampling.bias_starts, num_sampled, len(sampling.bias_values)),
        _fits_together(sampling.history_starts, num_sampled, len(sampling.history_token_ids)),
    )
    if any(len(column) != num_sampled for column in columns) or not all(ragged):
        return "the sampling plan's arrays do not fit together"
    return None


def wrong_sampling(plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> dict[int, str]:
    """What is wrong, by row: when it is sampled, with which parameters, bias and history."""
    rows = plan.rows_of(plan.sampling.token_indices)
    requests = [scheduled[row].request for row in rows]
    wrong = _wrong_places(plan, scheduled, rows)
    parameters = _parameters(plan.sampling)
    asked = _asked_parameters(requests)
    differs = np.zeros(len(rows), dtype=np.bool_)
    for name, column in asked.items():
        differs |= parameters[name] != column
    for index in np.flatnonzero(differs).tolist():
        wrong.setdefault(rows[index], "its sampling parameters are not those that were asked for")
    for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
        what = _wrong_bias(plan.sampling, index, request) or _wrong_history(
            plan.sampling, index, request
        )
        if what is not None:
            wrong.setdefault(row, what)
    return wrong


def _wrong_places(
    plan: StepPlan, scheduled: Sequence[ScheduledRequest], rows: list[int]
) -> dict[int, str]:
    index_of = {row: index for index, row in enumerate(rows)}
    positions = plan.positions[plan.sampling.token_indices]
    wrong: dict[int, str] = {}
    for row, entry in enumerate(scheduled):
        request, index = entry.request, index_of.get(row)
        expected = (
            entry.num_scheduled_tokens == request.num_uncomputed_tokens
            and request.samples_when_computed
        )
        if index is None:
            if expected:
                wrong[row] = "it would not be sampled"
        elif not expected:
            wrong[row] = "it would be sampled too early"
        elif positions[index] != request.num_tokens - 1:
            wrong[row] = "the token to be sampled is not the one after the last"
    return wrong


def _parameters(sampling: SamplingPlan) -> dict[str, NDArray[Any]]:
    return {
        "seed": sampling.seed,
        "choice": sampling.choice,
        "top_k": sampling.top_k,
        "num_logprobs": sampling.num_logprobs,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def _asked_parameters(requests: Sequence[Request]) -> dict[str, NDArray[Any]]:
    params = [request.params for request in requests]

    def floats(name: str) -> NDArray[np.float32]:
        return np.array([getattr(asked, name) for asked in params], dtype=np.float32)

    return {
        "seed": np.array([request.seed for request in requests], dtype=np.uint64),
        "choice": np.array([request.asked.choice for request in requests]),
        "top_k": np.array([asked.top_k for asked in params]),
        "num_logprobs": np.array(
            [NO_LOGPROBS if asked.logprobs is None else asked.logprobs for asked in params]
        ),
        "temperature": floats("temperature"),
        "top_p": floats("top_p"),
        "min_p": floats("min_p"),
        "repetition_penalty": floats("repetition_penalty"),
        "presence_penalty": floats("presence_penalty"),
        "frequency_penalty": floats("frequency_penalty"),
    }


def _wrong_bias(sampling: SamplingPlan, index: int, request: Request) -> str | None:
    start, end = int(sampling.bias_starts[index]), int(sampling.bias_starts[index + 1])
    bias = request.params.logit_bias
    if start == end and not bias:
        return None
    values = np.array(list(bias.values()), dtype=np.float32)
    if sampling.bias_token_ids[start:end].tolist() != list(bias) or not np.array_equal(
        sampling.bias_values[start:end], values
    ):
        return "its logit bias is not the one that was asked for"
    return None


def _wrong_history(sampling: SamplingPlan, index: int, request: Request) -> str | None:
    start, end = int(sampling.history_starts[index]), int(sampling.history_starts[index + 1])
    num_prompt = int(sampling.history_prompt_lens[index])
    if not request.params.has_penalties:
        return None if start == end and num_prompt == 0 else "its token history was not asked for"
    if not np.array_equal(sampling.history_token_ids[start:end], request.ledger.tokens):
        return "its token history is not the ledger's"
    if num_prompt != request.ledger.num_prompt_tokens:
        return f"its token history is said to hold {num_prompt} prompt tokens"
    return None


def _fits_together(starts: I32, num_rows: int, num_values: int) -> bool:
    return (
        len(starts) == num_rows + 1
        and starts[0] == 0
        and starts[-1] == num_values
        and bool((np.diff(starts) >= 0).all())
    )
