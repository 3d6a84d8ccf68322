"""Parts of a sampling plan, and rows of a logits matrix."""

from __future__ import annotations

import numpy as np
import torch

from tokentight.pipeline.plan import F32, I32, SamplingPlan
from tokentight.sampling.penalties import Adjustment


def slice_sampling(plan: SamplingPlan, rows: slice) -> SamplingPlan:
    """The plan of a contiguous run of rows (`rows.step` 1 or None), its ragged parts rebased."""
    start, stop, step = rows.indices(plan.seed.shape[0])
    if step != 1:
        raise ValueError(f"rows has step {step}; only contiguous rows can be sliced")
    stop = max(start, stop)
    bias = slice(int(plan.bias_starts[start]), int(plan.bias_starts[stop]))
    history = slice(int(plan.history_starts[start]), int(plan.history_starts[stop]))
    return SamplingPlan(
        token_indices=plan.token_indices[start:stop],
        temperature=plan.temperature[start:stop],
        top_k=plan.top_k[start:stop],
        top_p=plan.top_p[start:stop],
        min_p=plan.min_p[start:stop],
        repetition_penalty=plan.repetition_penalty[start:stop],
        presence_penalty=plan.presence_penalty[start:stop],
        frequency_penalty=plan.frequency_penalty[start:stop],
        seed=plan.seed[start:stop],
        choice=plan.choice[start:stop],
        num_logprobs=plan.num_logprobs[start:stop],
        bias_starts=_rebased(plan.bias_starts, start, stop),
        bias_token_ids=plan.bias_token_ids[bias],
        bias_values=plan.bias_values[bias],
        history_starts=_rebased(plan.history_starts, start, stop),
        history_token_ids=plan.history_token_ids[history],
        history_prompt_lens=plan.history_prompt_lens[start:stop],
    )


def adjustment_of(plan: SamplingPlan, row: int) -> Adjustment:
    """The penalties and bias of row `row`."""
    bias = slice(int(plan.bias_starts[row]), int(plan.bias_starts[row + 1]))
    history = slice(int(plan.history_starts[row]), int(plan.history_starts[row + 1]))
    return Adjustment(
        history=plan.history_token_ids[history],
        history_prompt_len=int(plan.history_prompt_lens[row]),
        repetition_penalty=float(plan.repetition_penalty[row]),
        presence_penalty=float(plan.presence_penalty[row]),
        frequency_penalty=float(plan.frequency_penalty[row]),
        bias_token_ids=plan.bias_token_ids[bias],
        bias_values=plan.bias_values[bias],
    )


def host_row(logits: torch.Tensor, row: int) -> F32:
    """Row `row` of `logits` `[L, V]` as a contiguous array, not copied where that is possible.

    Not to be written to.
    """
    array: F32 = logits[row].detach().contiguous().cpu().numpy()
    return array


def row_faults(logits: torch.Tensor) -> dict[int, str]:
    """Why rows of `logits` `[L, V]` are no distribution, by row; empty if they all are."""
    if logits.shape[0] == 0:
        return {}
    maxima = logits.amax(dim=-1).cpu().numpy()  # a NaN anywhere in a row is its maximum
    return {int(row): _fault(float(maxima[row])) for row in np.flatnonzero(~np.isfinite(maxima))}


def _fault(maximum: float) -> str:
    if np.isnan(maximum):
        return "its logits contain NaN, so the model's output is broken and nothing is sampled"
    if maximum > 0:
        return "its logits contain +inf, so the model's output is broken and nothing is sampled"
    return "every one of its logits is -inf, so there is no token to sample"


def _rebased(starts: I32, start: int, stop: int) -> I32:
    rebased: I32 = starts[start : stop + 1] - starts[start]
    return rebased
