"""Request bodies as JSON and nothing else: no NaN, no half surrogates, no other content type."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from tokentight.server.errors import ApiError, bad_request, shown


class _StrictJsonRequest(Request):
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise bad_request(None, f"the body is not valid JSON: {error}") from error


class StrictJsonRoute(APIRoute):
    """A route whose body is read by the rules of RFC 8259 rather than Python's laxer ones."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            if request.method == "POST":
                content_type = request.headers.get("content-type", "")
                if content_type.split(";")[0].strip().lower() != "application/json":
                    raise ApiError(
                        415,
                        f"Content-Type is {shown(content_type)}; it must be application/json",
                    )
            return await handle(_StrictJsonRequest(request.scope, request.receive))

        return handle_strictly
