"""What the engine tells callers about a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FinishReason(str, Enum):
    """Why a request ended. `STOP` and `LENGTH` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprob of one chosen (or prompt) token, and the most likely tokens at its place.

    Logprobs are of the model's own distribution, before temperature and penalties. `top` holds
    (token id, logprob), most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What is new for a request since its last output.

    `text` is only ever whole characters, and never text that may yet turn out to be the beginning
    of a stop string. `token_ids` and `logprobs` run in step with each other and may run ahead of
    `text`. `prompt_logprobs` comes once, with the first output: entry i is for prompt token i, and
    entry 0 is None (nothing stands before it).
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    num_cached_tokens: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
