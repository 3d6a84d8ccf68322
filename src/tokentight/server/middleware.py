"""What surrounds every request: its id, its log line, its key, its size. Pure ASGI."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentight.server.engine_api import EngineStatus, ServingEngine
from tokentight.server.errors import ApiError
from tokentight.server.request_log import current_request_id

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""Answered without an API key: probes and scrapers have none."""


class RequestContext:
    """Gives every request an id, a log line, and an answer even when the code below fails."""

    def __init__(self, app: ASGIApp, engine: ServingEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if self._engine.status is EngineStatus.DRAINING:
                    headers["Connection"] = "close"
            await send(message)

        token = current_request_id.set(request_id)
        started = time.monotonic()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("unexpected error")
            if status == 0:
                answer = ApiError(500, f"internal error; the log has it under {request_id}")
                await answer.response()(scope, receive, send_with_id)
        finally:
            probed = scope["path"] in OPEN_PATHS and status < 400
            logger.log(
                logging.DEBUG if probed else logging.INFO,  # probes come every few seconds
                '"%s %s" %s %.3fs',
                scope["method"],
                _loggable_path(scope),
                status or "unanswered",
                time.monotonic() - started,
            )
            current_request_id.reset(token)


class ApiKeys:
    """Wants one of the keys as bearer token, except on the open paths."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "")
            scheme, _, key = given.partition(" ")
            if scheme.lower() != "bearer" or not self._knows(key.strip().encode("latin-1")):
                refusal = ApiError(
                    401,
                    "a valid API key is needed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, given: bytes) -> bool:
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all, in equal time
        return any(matches)


class BodyLimit:
    """Answers 413 to a body that says it is too large, or turns out to be, and 408 to one that
    stops coming for `timeout_s` seconds."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and (
            len(announced) > len(str(self._max_bytes)) or int(announced) > self._max_bytes
        ):
            await self._too_large().response()(scope, receive, send)
            return
        num_bytes = 0
        is_complete = False

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # what comes now is the news that the client has gone
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._timeout_s)
            except asyncio.TimeoutError:
                raise self._stalled() from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            is_complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the request's body is larger than {self._max_bytes} bytes, the limit of this server",
            code="body_too_large",
            headers={"Connection": "close"},
        )

    def _stalled(self) -> ApiError:
        return ApiError(
            408,
            f"the request's body stopped coming for {self._timeout_s:g} s",
            code="body_timeout",
            headers={"Connection": "close"},
        )


def _request_id(given: str | None) -> str:
    """The caller's own id where it can be logged and sent back as it is, else a new one."""
    if (
        given is not None
        and 0 < len(given) <= MAX_REQUEST_ID_CHARS
        and given.isascii()
        and given.isprintable()
    ):
        return given
    return uuid.uuid4().hex


def _loggable_path(scope: Scope) -> str:
    """The path as it was sent, still percent-encoded, without the query: that may hold secrets."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return ascii(raw.decode("latin-1"))[1:-1]
