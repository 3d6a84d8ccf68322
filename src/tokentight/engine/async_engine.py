"""The engine behind a service: a thread runs the step loop, coroutines read their outputs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tokentight.engine.build import EngineParts, build_engine
from tokentight.engine.config import EngineConfig
from tokentight.engine.core import Update
from tokentight.engine.errors import (
    EngineDeadError,
    EngineDrainingError,
    QueueFullError,
)
from tokentight.engine.outputs import FinishReason, RequestOutput
from tokentight.engine.request import GenerationRequest
from tokentight.engine.request_stream import RequestStream
from tokentight.engine.status import EngineInfo, EngineStats, EngineStatus
from tokentight.models.tokenizer import Tokenizer
from tokentight.pipeline.processes import LoadingProgress

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
"""What a refused caller is told to wait: a few requests' worth of time."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: GenerationRequest
    max_num_tokens: int
    stream: RequestStream


@dataclass(frozen=True, slots=True)
class _Abort:
    stream: RequestStream


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class AsyncEngine:
    """Start it on the event loop that will use it: `await AsyncEngine.start(config)`."""

    def __init__(self, config: EngineConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._loop = loop
        self._status = EngineStatus.STARTING
        self._status_detail = "loading the model"
        self._draining = False
        self._open: set[RequestStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._commands: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._parts: EngineParts | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    async def start(
        cls, config: EngineConfig, progress: LoadingProgress | None = None
    ) -> AsyncEngine:
        """Load the model, start the stages and the step loop; raises as `build_engine` does."""
        engine = cls(config, asyncio.get_running_loop())
        building = asyncio.ensure_future(
            asyncio.to_thread(build_engine, config, engine._recovery_changed, progress)
        )
        try:
            engine._parts = await asyncio.shield(building)
        except asyncio.CancelledError:  # the thread cannot be stopped; what it builds can
            building.add_done_callback(_close_what_was_built)
            raise
        engine._thread = threading.Thread(
            target=engine._run, args=(engine._parts,), name="tokentight-engine", daemon=True
        )
        engine._thread.start()
        engine._set_status(EngineStatus.READY, "")
        return engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self._started.tokenizer

    @property
    def info(self) -> EngineInfo:
        return self._started.info

    @property
    def status(self) -> EngineStatus:
        if self._draining and self._status is EngineStatus.READY:
            return EngineStatus.DRAINING
        return self._status

    @property
    def status_detail(self) -> str:
        return self._status_detail

    def stats(self) -> EngineStats:
        return self._started.core.stats()

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue a request.

        Raises:
            RequestError: it can never be served.
            QueueFullError: not now.
            EngineDrainingError, EngineDeadError: not any more.
        """
        if self._status is EngineStatus.DEAD:
            raise EngineDeadError(self._status_detail)
        if self._draining:
            raise EngineDrainingError("the engine is shutting down")
        max_num_tokens = self._started.admission.max_num_tokens(request)
        # Counted until its last output is taken: unread answers are bounded too.
        if len(self._open) >= self._config.max_num_seqs + self._config.max_queued_requests:
            raise QueueFullError(RETRY_AFTER_S)
        stream = RequestStream(request.request_id, self._stream_ended)
        self._open.add(stream)
        self._idle.clear()
        self._send(_Add(request, max_num_tokens, stream))
        return stream

    async def drain(self) -> None:
        """Take nothing new; returns when every open request has ended, or the engine has."""
        self._draining = True
        await self._idle.wait()

    async def shutdown(self) -> None:
        """End the step loop and the stages; open requests fail."""
        if self._thread is not None and self._thread.is_alive():
            self._send(_Stop())
            self._started.pipeline.give_up_recovery()
            await asyncio.to_thread(self._thread.join)
        if self._parts is not None:
            await asyncio.to_thread(self._parts.pipeline.close)

    @property
    def _started(self) -> EngineParts:
        assert self._parts is not None, "the engine has not been started"
        return self._parts

    def _stream_ended(self, stream: RequestStream, aborted: bool) -> None:
        self._open.discard(stream)
        if not self._open:
            self._idle.set()
        if aborted and self._status is not EngineStatus.DEAD:
            self._send(_Abort(stream))

    def _send(self, command: _Add | _Abort | _Stop) -> None:
        self._commands.put(command)
        self._started.pipeline.wake()

    # What follows runs on the engine's thread.

    def _run(self, parts: EngineParts) -> None:
        streams: dict[int, RequestStream] = {}
        numbers: dict[RequestStream, int] = {}
        reason = "the engine was shut down"
        try:
            while self._take_commands(parts, streams, numbers):
                self._deliver(parts.core.step(), streams, numbers)
        except EngineDeadError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("the engine's step loop failed")
            reason = f"internal error: {error!r}"
        logger.log(
            logging.INFO if reason == "the engine was shut down" else logging.CRITICAL,
            "the engine has ended: %s",
            reason,
        )
        self._on_loop(lambda: self._die(reason))

    def _take_commands(
        self,
        parts: EngineParts,
        streams: dict[int, RequestStream],
        numbers: dict[RequestStream, int],
    ) -> bool:
        """Apply what was sent, waiting if there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not parts.core.has_work)
            except queue.Empty:
                return True
            match command:
                case _Add(request, max_num_tokens, stream):
                    try:
                        number = parts.core.add(request, max_num_tokens)
                    except Exception as error:  # one request's trouble is not the others'
                        logger.exception("request %s could not be queued", request.request_id)
                        self._refuse(stream, f"internal error: {error!r}")
                        continue
                    streams[number] = stream
                    numbers[stream] = number
                case _Abort(stream):
                    number_or_none = numbers.pop(stream, None)
                    if number_or_none is not None:
                        del streams[number_or_none]
                        parts.core.abort(number_or_none)
                case _Stop():
                    return False

    def _deliver(
        self,
        updates: list[Update],
        streams: dict[int, RequestStream],
        numbers: dict[RequestStream, int],
    ) -> None:
        deliveries: list[tuple[RequestStream, RequestOutput]] = []
        for update in updates:
            stream = streams.get(update.request_number)
            if stream is None:
                continue
            deliveries.append((stream, update.output))
            if update.output.finished:
                del streams[update.request_number]
                del numbers[stream]
        if deliveries:
            self._on_loop(lambda: _put_all(deliveries))

    def _refuse(self, stream: RequestStream, error: str) -> None:
        output = RequestOutput(
            request_id=stream.request_id,
            text="",
            token_ids=(),
            logprobs=None,
            prompt_logprobs=None,
            num_cached_tokens=0,
            finish_reason=FinishReason.ERROR,
            stop_reason=None,
            error=error,
        )
        self._on_loop(lambda: stream.put(output))

    def _recovery_changed(self, reason: str | None) -> None:
        if reason is None:
            self._on_loop(lambda: self._set_status(EngineStatus.READY, ""))
        else:
            self._on_loop(lambda: self._set_status(EngineStatus.RECOVERING, reason))

    def _on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.debug("the event loop is closed")

    # And this on the event loop again.

    def _set_status(self, status: EngineStatus, detail: str) -> None:
        if self._status is not EngineStatus.DEAD:
            self._status = status
            self._status_detail = detail

    def _die(self, reason: str) -> None:
        self._set_status(EngineStatus.DEAD, reason)
        for stream in self._open:
            stream.fail(EngineDeadError(reason))
        self._idle.set()


def _close_what_was_built(building: asyncio.Future[EngineParts]) -> None:
    if not building.cancelled() and building.exception() is None:
        building.result().pipeline.close()


def _put_all(deliveries: list[tuple[RequestStream, RequestOutput]]) -> None:
    for stream, output in deliveries:
        stream.put(output)
