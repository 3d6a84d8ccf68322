"""Server-sent events, and clients that go away or stop reading."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokentight.server.errors import ApiError, ClientGoneError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(payload, inf_nan_mode="null") + b"\n\n"


class JsonResponse(Response):
    """Compact JSON, floats written so that reading gives the same bits."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content, inf_nan_mode="null")


class Answer(Protocol):
    """A request that the engine is answering, told whole or as events."""

    def events(self) -> AsyncIterator[bytes]: ...

    async def whole(self) -> Mapping[str, Any]: ...

    def abort(self) -> None: ...


async def respond(
    answer: Answer, receive: Receive, *, stream: bool, send_timeout_s: float
) -> Response:
    """The HTTP response of `answer`, which is aborted when it ends in any way.

    Raises:
        ClientGoneError: the client went away before a whole answer was ready.
        ApiError: the answer ended in an error.
    """
    if stream:
        return EventStream(answer.events(), answer.abort, send_timeout_s)
    try:
        return JsonResponse(await until_disconnect(receive, answer.whole()))
    finally:
        answer.abort()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    The request's body must have been read.

    Raises:
        ClientGoneError: the client went away first.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await _any_done(worker, watcher)
        if worker.done():
            return worker.result()
        raise ClientGoneError
    finally:
        await _cancelled(worker, watcher)


class EventStream(Response):
    """`text/event-stream` of `events`. `abort` is called at the end, whatever the end.

    Events are made only as fast as the client takes them. A client that goes away, or takes
    nothing for `send_timeout_s` seconds (noticed within twice that), ends the stream. An ApiError
    raised by `events` becomes the last event, and no [DONE] follows it.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], abort: Callable[[], None], send_timeout_s: float
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._abort = abort
        self._send_timeout_s = send_timeout_s
        self._sending_since: float | None = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            while not await _any_done(writer, watcher, self._send_timeout_s):
                if self._is_stalled():
                    # Returning without the rest of the body makes the server close the connection.
                    logger.warning(
                        "client took nothing for %g s: request aborted, connection closed",
                        self._send_timeout_s,
                    )
                    return
            if writer.done():
                writer.result()
            else:
                logger.info("client gone in mid-stream: request aborted")
        finally:
            self._abort()
            await _cancelled(writer, watcher)

    async def _write(self, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await self._send(send, start)
        async for chunk in self._error_as_event():
            body = {"type": "http.response.body", "body": chunk, "more_body": True}
            await self._send(send, body)
        await self._send(send, {"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await send(message)
        self._sending_since = None

    def _is_stalled(self) -> bool:
        if self._sending_since is None:
            return False
        waited = asyncio.get_running_loop().time() - self._sending_since
        return waited >= self._send_timeout_s

    async def _error_as_event(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._events:
                yield chunk
        except ApiError as error:
            logger.error("stream ended in an error: %s", error.message)
            yield event(error.body())
        except Exception:
            logger.exception("stream ended in an unexpected error")
            yield event(ApiError(500, "internal error; the server's log has it").body())


async def _any_done(
    one: asyncio.Future[Any], other: asyncio.Future[Any], timeout_s: float | None = None
) -> bool:
    done, _ = await asyncio.wait(
        {one, other}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
    )
    return bool(done)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
