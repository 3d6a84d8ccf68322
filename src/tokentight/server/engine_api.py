"""What the service needs of an engine, and the engine's own words for it, in one place.

The service is written against these protocols; `tokentight.engine.async_engine.AsyncEngine` is
the one that serves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from tokentight.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from tokentight.engine.request import GenerationRequest
from tokentight.sampling.params import SamplingParams

__all__ = [
    "EngineDeadError",
    "EngineDrainingError",
    "EngineInfo",
    "EngineStats",
    "EngineStatus",
    "FinishReason",
    "GenerationRequest",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "ServingEngine",
    "ServingTokenizer",
    "TokenLogprobs",
]


class EngineStatus(Enum):
    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    DEAD = "dead"


class RequestError(ValueError):
    """The request itself cannot be served; `param` names what is wrong with it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again after `retry_after_s` seconds."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the queue is full")
        self.retry_after_s = retry_after_s


class EngineDeadError(RuntimeError):
    """The engine has ended and cannot serve."""


class EngineDrainingError(RuntimeError):
    """The engine finishes what it has and takes nothing new."""


@dataclass(frozen=True)
class EngineInfo:
    model: str
    max_model_len: int
    vocab_size: int
    num_stages: int
    kernels: str
    promise_holds: bool


@dataclass(frozen=True)
class EngineStats:
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    audit_violations: int
    stage_restarts: int


class ServingTokenizer(Protocol):
    """Text to token ids and back. Safe to call from several threads."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class RequestStream(Protocol):
    """The outputs of one request. Those not taken yet are merged into one."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    def abort(self) -> None: ...


class ServingEngine(Protocol):
    """An engine that is started, as the service sees it."""

    @property
    def tokenizer(self) -> ServingTokenizer: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def status(self) -> EngineStatus: ...

    @property
    def status_detail(self) -> str: ...

    def submit(self, request: GenerationRequest) -> RequestStream: ...

    def stats(self) -> EngineStats: ...

    async def drain(self) -> None: ...

    async def shutdown(self) -> None: ...
