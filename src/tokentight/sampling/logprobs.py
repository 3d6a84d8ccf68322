"""Logprobs of given tokens and of their most likely rivals, from raw logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokentight.kernels.interface import Kernels
from tokentight.pipeline.plan import F32, I32, NO_LOGPROBS, Logprobs
from tokentight.sampling.errors import SamplingError
from tokentight.sampling.filters import in_order, largest_ids
from tokentight.sampling.rows import host_row, row_faults


def score(logits: torch.Tensor, targets: I32, num_logprobs: I32, kernels: Kernels) -> Logprobs:
    """Logprobs of the prompt tokens `targets` `[P]` under `logits` `[P, V]` (float32).

    Raises:
        SamplingError: where a row's logits contain NaN or +inf, or are all -inf, or a target is
            no token of the vocabulary.
    """
    reasons = row_faults(logits)
    vocab_size = logits.shape[1]
    for row in np.flatnonzero((targets < 0) | (targets >= vocab_size)):
        reasons[int(row)] = (
            f"target token id {int(targets[row])} is not in the vocabulary of {vocab_size} tokens"
        )
    if reasons:
        raise SamplingError(reasons)
    return logprobs_of(logits, targets, num_logprobs, kernels)


def logprobs_of(
    logits: torch.Tensor, token_ids: I32, num_logprobs: I32, kernels: Kernels
) -> Logprobs:
    """Logprobs of `token_ids` `[N]` under `logits` `[N, V]`, both valid in every asking row.

    A logprob is `logit - logsumexp(row)` in float32; a rank is one more than the number of
    logits that are strictly greater. `K` is the most that any row asks for. Rows with fewer are
    padded with id -1 and logprob 0; rows that ask for none hold zeros.
    """
    num_rows, vocab_size = logits.shape
    asking = np.flatnonzero(num_logprobs != NO_LOGPROBS)
    width = min(int(num_logprobs.max(initial=0)), vocab_size)
    result = Logprobs(
        logprob=np.zeros(num_rows, dtype=np.float32),
        rank=np.zeros(num_rows, dtype=np.int32),
        top_token_ids=np.full((num_rows, width), -1, dtype=np.int32),
        top_logprobs=np.zeros((num_rows, width), dtype=np.float32),
    )
    if asking.shape[0] == 0:
        return result
    normalizers = _logsumexp(logits, asking, kernels)
    for row, normalizer in zip(asking.tolist(), normalizers, strict=True):
        values = host_row(logits, row)
        chosen = values[token_ids[row]]
        result.logprob[row] = chosen - normalizer
        result.rank[row] = 1 + np.count_nonzero(values > chosen)
        count = min(int(num_logprobs[row]), vocab_size)
        if count:
            top = in_order(values, largest_ids(values, count))
            result.top_token_ids[row, :count] = top
            result.top_logprobs[row, :count] = values[top] - normalizer
    return result


def _logsumexp(logits: torch.Tensor, rows: NDArray[np.intp], kernels: Kernels) -> F32:
    if rows.shape[0] < logits.shape[0]:
        logits = logits[torch.from_numpy(rows).to(logits.device)]
    array: F32 = kernels.logsumexp(logits).cpu().numpy()
    return array
