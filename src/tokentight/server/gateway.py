"""What listens before the service is there: alive, and not ready."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tokentight.server.errors import ApiError


class Gateway:
    """Passes requests to `app` once there is one.

    Until then `/health` says that the process is alive, and all else is answered 503.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _starting(scope["path"])(scope, receive, send)


def _starting(path: str) -> JSONResponse:
    state = {"status": "starting", "detail": "the model is being loaded"}
    if path in ("/health", "/ready"):
        return JSONResponse(state, status_code=200 if path == "/health" else 503)
    error = ApiError(
        503,
        "the server is starting: the model is being loaded",
        code="server_starting",
        headers={"Retry-After": "1"},
    )
    return error.response()
