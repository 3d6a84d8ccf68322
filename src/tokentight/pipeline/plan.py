"""The step plan: everything a stage needs to know of a step, and nothing it must remember.

Stages hold weights and KV blocks and keep no state about requests. Each step they get one
self-contained plan; the plan travels down the pipeline beside the hidden states it belongs to.
A plan carries a digest over every byte of itself, and whoever receives it checks that digest.

Array shapes: `T` scheduled tokens, `R` rows (requests of this step), `W` blocks of the longest
block table, `S` rows that sample a token, `P` prompt tokens whose logprob is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]

NO_LOGPROBS = -1
"""`num_logprobs` of a row that wants none; 0 asks for the chosen token's alone."""

NO_TOKEN = -1
"""Sampled token id of a row that no token can be sampled from (its logits are not finite, or all
are banned). The logprob of a prompt token whose logits are not finite is NaN."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What the last stage needs to choose a token for each of `S` rows.

    Ragged parts are `values[starts[i]:starts[i + 1]]`. Token history is sent only for rows with
    penalties: `history_token_ids` holds prompt then output, of which the first
    `history_prompt_lens[i]` are prompt.
    """

    token_indices: I32  # [S] index into the plan's tokens whose logits are sampled
    temperature: F32  # [S] 0 is greedy
    top_k: I32  # [S] 0 is off
    top_p: F32  # [S] 1 is off
    min_p: F32  # [S] 0 is off
    repetition_penalty: F32  # [S] 1 is off
    presence_penalty: F32  # [S] 0 is off
    frequency_penalty: F32  # [S] 0 is off
    seed: U64  # [S]
    choice: I32  # [S]
    num_logprobs: I32  # [S]
    bias_starts: I32  # [S + 1]
    bias_token_ids: I32
    bias_values: F32
    history_starts: I32  # [S + 1]
    history_token_ids: I32
    history_prompt_lens: I32  # [S]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine, complete in itself."""

    step: int
    epoch: int
    token_ids: I32  # [T]
    positions: I32  # [T]
    slots: I64  # [T]
    request_numbers: I64  # [R]
    query_starts: I32  # [R + 1]
    context_lens: I32  # [R]
    block_tables: I32  # [R, W]
    scored_token_indices: I32  # [P] index of the token before the scored one
    scored_targets: I32  # [P] the prompt token whose logprob is wanted
    scored_num_logprobs: I32  # [P]
    sampling: SamplingPlan

    @property
    def num_scheduled_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.request_numbers.shape[0])

    def rows_of(self, token_indices: I32) -> list[int]:
        """The rows that tokens of this plan belong to."""
        starts = self.query_starts
        rows: list[int] = (np.searchsorted(starts, token_indices, side="right") - 1).tolist()
        return rows


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs of `N` chosen tokens and their `K` most likely rivals (padded with id -1)."""

    logprob: F32  # [N]
    rank: I32  # [N] 1 is the most likely token
    top_token_ids: I32  # [N, K] most likely first, lower id first on ties
    top_logprobs: F32  # [N, K]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the last stage answers. `digest` is that of the plan it belongs to."""

    step: int
    epoch: int
    digest: bytes
    sampled_token_ids: I32  # [S]
    sampled: Logprobs  # N = S; rows that want no logprobs hold zeros
    scored: Logprobs  # N = P
