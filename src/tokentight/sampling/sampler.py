"""From logits to tokens.

The token drawn for a row is a pure function of that row's logits, its parameters and its noise:
reductions are over one row at a time, or are the kernels' own, which are row-invariant.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokentight.kernels.interface import Kernels
from tokentight.pipeline.plan import F32, I32, NO_LOGPROBS, NO_TOKEN, Logprobs, SamplingPlan
from tokentight.sampling.errors import SamplingError
from tokentight.sampling.filters import surviving_ids
from tokentight.sampling.logprobs import logprobs_of, score
from tokentight.sampling.noise import uniform
from tokentight.sampling.rows import adjustment_of, host_row, row_faults, slice_sampling

__all__ = ["draw", "sample", "sample_valid_rows", "score", "slice_sampling"]


def sample(
    logits: torch.Tensor, positions: I32, plan: SamplingPlan, kernels: Kernels
) -> tuple[I32, Logprobs]:
    """Choose a token for each row of `logits` (float32 `[S, V]`); `positions` `[S]` are theirs.

    In this order, as in vLLM: logprobs are taken from the raw logits; penalties; logit bias;
    greedy rows (temperature 0) take the largest, the lowest id on ties; the others are divided by
    the temperature, filtered by min-p, top-k and top-p, and drawn by inverting the cumulative
    distribution over the surviving tokens in the order of their ids, with one uniform number.

    Raises:
        SamplingError: naming every row that no token can be sampled from.
    """
    token_ids, logprobs, reasons = sample_valid_rows(logits, positions, plan, kernels)
    if reasons:
        raise SamplingError(reasons)
    return token_ids, logprobs


def sample_valid_rows(
    logits: torch.Tensor, positions: I32, plan: SamplingPlan, kernels: Kernels
) -> tuple[I32, Logprobs, dict[int, str]]:
    """As `sample`, but one row's fault does not cost the others their tokens.

    A row that no token can be sampled from gets `NO_TOKEN`, no logprobs, and its reason.
    """
    reasons = row_faults(logits)
    token_ids = np.full(logits.shape[0], NO_TOKEN, dtype=np.int32)
    greedy = plan.temperature == 0
    adjusted = _adjusted_rows(plan)
    plain = greedy & ~adjusted
    if plain.any():
        token_ids[plain] = kernels.argmax(logits).cpu().numpy()[plain]
    noise = uniform(plan.seed, plan.choice, positions)
    for row in np.flatnonzero(~plain).tolist():
        if row in reasons:
            continue
        values = host_row(logits, row)
        if adjusted[row]:
            adjustment = adjustment_of(plan, row)
            fault = adjustment.fault(values.shape[0])
            if fault is not None:
                reasons[row] = fault
                continue
            values = adjustment.apply(values)
        if greedy[row]:
            token_ids[row] = values.argmax()
        else:
            token_ids[row] = _draw(values, plan, row, float(noise[row]), kernels)
    num_logprobs = plan.num_logprobs
    if reasons:
        faulty = list(reasons)
        token_ids[faulty] = NO_TOKEN
        num_logprobs = num_logprobs.copy()
        num_logprobs[faulty] = NO_LOGPROBS
    return token_ids, logprobs_of(logits, token_ids, num_logprobs, kernels), reasons


def draw(probabilities: F32, survivors: NDArray[np.intp] | None, noise: float) -> int:
    """The token at `noise` (in [0, 1)) of the distribution over `survivors` (None: all tokens).

    The first, in ascending order of ids, at which the cumulative mass exceeds `noise` times the
    whole. A token of probability 0 is never drawn.
    """
    weights = probabilities if survivors is None else probabilities[survivors]
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, noise * cumulative[-1], side="right"))
    if index == cumulative.shape[0]:  # the product was rounded up to the whole
        index = int(np.flatnonzero(weights)[-1])
    return index if survivors is None else int(survivors[index])


def _draw(values: F32, plan: SamplingPlan, row: int, noise: float, kernels: Kernels) -> int:
    # The maximum goes first, so that no temperature, however small, makes an infinity of it.
    with np.errstate(over="ignore"):
        scaled: F32 = (values - values.max()) / plan.temperature[row]
    on_device = torch.from_numpy(scaled).unsqueeze(0).to(kernels.device)
    probabilities: F32 = kernels.softmax(on_device)[0].cpu().numpy()
    survivors = surviving_ids(
        scaled,
        probabilities,
        top_k=int(plan.top_k[row]),
        top_p=float(plan.top_p[row]),
        min_p=float(plan.min_p[row]),
    )
    return draw(probabilities, survivors, noise)


def _adjusted_rows(plan: SamplingPlan) -> NDArray[np.bool_]:
    """Rows whose logits are changed before they are scaled."""
    biased = np.diff(plan.bias_starts) > 0
    penalized = (
        (plan.repetition_penalty != 1)
        | (plan.presence_penalty != 0)
        | (plan.frequency_penalty != 0)
    )
    return np.asarray(biased | penalized, dtype=np.bool_)
