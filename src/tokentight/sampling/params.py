"""What a caller may ask of sampling. Torch-free: the HTTP service and the engine both use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16


class SamplingParamsError(ValueError):
    """A sampling parameter out of range; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next tokens of one request are chosen.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Penalties are those of
    the OpenAI API (presence, frequency: over the output) and of CTRL (repetition: over prompt and
    output, https://arxiv.org/abs/1909.05858). `logprobs` and `prompt_logprobs`: None for none, 0
    for the chosen token's alone, N for the N most likely besides. `max_tokens` None means as many
    as the context length allows; 0 computes the prompt alone (for `echo` and `prompt_logprobs`).

    Raises:
        SamplingParamsError: naming the parameter, its value and what is allowed.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0, 100)
        _in_range("top_p", self.top_p, 0, 1, low_open=True)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("repetition_penalty", self.repetition_penalty, 0, 100, low_open=True)
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _in_range("seed", self.seed, 0, 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise SamplingParamsError(
                "logit_bias",
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are "
                "allowed",
            )
        for token_id, bias in self.logit_bias.items():
            _in_range(f"logit_bias[{token_id}]", bias, -100, 100, param="logit_bias")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise SamplingParamsError(
                "stop", f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed"
            )
        if any(not string for string in self.stop):
            raise SamplingParamsError("stop", "stop must not contain an empty string")

    @property
    def has_penalties(self) -> bool:
        """Whether the token history is needed to choose the next token."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _in_range(
    name: str,
    value: float,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    param: str | None = None,
) -> None:
    above = value > low if low_open else value >= low
    if not (math.isfinite(value) and above and value <= high):
        bracket = "(" if low_open else "["
        raise SamplingParamsError(
            param or name, f"{name} is {value}; it must be in {bracket}{low}, {high}]"
        )
