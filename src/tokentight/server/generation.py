"""The engine requests of one HTTP request: submitted together, read together, aborted together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from tokentight.server.engine_api import (
    EngineStatus,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    RequestStream,
    ServingEngine,
)
from tokentight.server.errors import ENGINE_ERRORS, ApiError, engine_error
from tokentight.server.metrics import RequestTimer, ServerMetrics


class Generation:
    """All choices of all prompts of one HTTP request; a choice's index is its place in `requests`.

    Raises:
        ApiError: the engine refused one of the requests; then those before it are aborted.
    """

    def __init__(
        self,
        engine: ServingEngine,
        metrics: ServerMetrics,
        requests: Sequence[GenerationRequest],
    ) -> None:
        self._engine = engine
        self._streams: list[RequestStream] = []
        self._timers: list[RequestTimer] = []
        self._finished: set[int] = set()
        self._aborted = False
        try:
            for request in requests:
                self._streams.append(engine.submit(request))
                self._timers.append(metrics.start_request())
        except ENGINE_ERRORS as error:
            self.abort()
            raise engine_error(error) from error

    def abort(self) -> None:
        """End what has not finished. Harmless when all has, and when called again."""
        if self._aborted:
            return
        self._aborted = True
        for index, stream in enumerate(self._streams):
            if index not in self._finished:
                stream.abort()
                self._timers[index].finished(FinishReason.ABORT)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(choice index, output) as they come, until every choice has finished.

        Raises:
            ApiError: a choice ended in an error; the others are aborted.
        """
        try:
            async with contextlib.aclosing(_merged(self._streams)) as merged:
                async for index, output in merged:
                    self._timers[index].took(output, time.monotonic())
                    if output.finish_reason is not None:
                        self._finished.add(index)
                        self._timers[index].finished(output.finish_reason)
                    self._raise_error_of(output)
                    yield index, output
        except ENGINE_ERRORS as error:
            raise engine_error(error) from error
        finally:
            self.abort()

    def _raise_error_of(self, output: RequestOutput) -> None:
        if output.finish_reason is FinishReason.ERROR:
            dead = self._engine.status is EngineStatus.DEAD
            raise ApiError(
                503 if dead else 500,
                output.error or "the request ended in an error",
                code="engine_dead" if dead else "request_failed",
            )
        if output.finish_reason is FinishReason.ABORT:
            raise ApiError(
                503, "the server ended the request before it finished", code="request_aborted"
            )


async def _merged(
    streams: Sequence[RequestStream],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams. Each holds at most one that is not yet taken."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    ready: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=1)

    async def forward(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await ready.put((index, output))
            await ready.put(None)
        except Exception as error:  # handed to the reader, who raises it
            await ready.put(error)

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await ready.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
