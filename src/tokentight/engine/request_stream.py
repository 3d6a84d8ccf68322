"""What a caller of the asynchronous engine reads a request's outputs from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tokentight.engine.errors import EngineDeadError
from tokentight.engine.merge import merge
from tokentight.engine.outputs import RequestOutput


class RequestStream:
    """The outputs of one request, in order, as an asynchronous iterator.

    Outputs not yet taken are merged into one, so a slow reader holds one output, no longer than
    the request itself. Lives on the event loop. `on_end` is called once: when the last output has
    been taken, or with the request aborted (True).
    """

    def __init__(self, request_id: str, on_end: Callable[[RequestStream, bool], None]) -> None:
        self.request_id = request_id
        self._on_end = on_end
        self._pending: RequestOutput | None = None
        self._error: EngineDeadError | None = None
        self._arrived = asyncio.Event()
        self._ended = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._ended:
            output, self._pending = self._pending, None
            if output is not None:
                if output.finished:
                    self._end(aborted=False)
                return output
            if self._error is not None:
                self._end(aborted=False)
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        raise StopAsyncIteration

    def abort(self) -> None:
        """End the request and free what it holds. Harmless after the end."""
        if not self._ended:
            self._end(aborted=True)

    def put(self, output: RequestOutput) -> None:
        """Called by the engine, on the event loop."""
        if not self._ended:
            self._pending = merge(self._pending, output) if self._pending else output
            self._arrived.set()

    def fail(self, error: EngineDeadError) -> None:
        """Called by the engine, on the event loop: there will be no more outputs."""
        self._error = error
        self._arrived.set()

    def _end(self, *, aborted: bool) -> None:
        self._ended = True
        self._arrived.set()
        self._on_end(self, aborted)
