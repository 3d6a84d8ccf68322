"""Penalties and logit bias of one row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokentight.pipeline.plan import F32, I32

_LARGEST = np.float32(np.finfo(np.float32).max)
_SMALLEST_PENALTY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What changes one row's logits before they are scaled. `history` is prompt, then output."""

    history: I32
    history_prompt_len: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_token_ids: I32
    bias_values: F32

    def fault(self, vocab_size: int) -> str | None:
        """Why this cannot be applied to a row of `vocab_size` logits, None if it can."""
        for name, ids in (("logit_bias", self.bias_token_ids), ("token history", self.history)):
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if outside.shape[0]:
                return (
                    f"{name} names token id {int(outside[0])}, but the vocabulary has token ids "
                    f"0 to {vocab_size - 1}"
                )
        return None

    def apply(self, logits: F32) -> F32:
        """A changed copy of `logits` `[V]`, float32.

        Repetition (https://arxiv.org/abs/1909.05858): of every token in prompt or output, a
        positive logit is divided by the penalty and another multiplied. Frequency and presence
        (OpenAI): of every output token, `frequency * count + presence` is taken off. Then the
        bias is added. Results beyond float32 saturate, so no parameter can make a logit infinite.
        """
        logits = logits.copy()
        if self.repetition_penalty != 1.0:
            seen = np.unique(self.history)
            penalty = np.float32(max(self.repetition_penalty, _SMALLEST_PENALTY))
            values = logits[seen]
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / penalty, values * penalty)
            logits[seen] = np.minimum(values, _LARGEST)
        if self.frequency_penalty != 0.0 or self.presence_penalty != 0.0:
            output = self.history[self.history_prompt_len :]
            seen, counts = np.unique(output, return_counts=True)
            logits[seen] -= np.float32(self.frequency_penalty) * counts.astype(np.float32)
            logits[seen] -= np.float32(self.presence_penalty)
        logits[self.bias_token_ids] += self.bias_values
        return logits
