"""What the service needs of an engine, and the engine's own words for it, in one place.

The service is written against these protocols; `tokentight.engine.async_engine.AsyncEngine` is
the one that serves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from tokentight.engine.errors import (
    EngineDeadError,
    EngineDrainingError,
    QueueFullError,
    RequestError,
)
from tokentight.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from tokentight.engine.request import GenerationRequest
from tokentight.engine.status import EngineInfo, EngineStats, EngineStatus
from tokentight.models.chat_template import ChatTemplate
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


class ServingTokenizer(Protocol):
    """Text to token ids and back. Safe to call from several threads."""

    @property
    def is_byte_level(self) -> bool: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...

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
