"""Every error leaves the service in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import HTTPException, RequestValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from tokentight.sampling.params import SamplingParamsError
from tokentight.server.engine_api import (
    EngineDeadError,
    EngineDrainingError,
    QueueFullError,
    RequestError,
)

MAX_ECHOED_CHARS = 80
"""How much of a caller's own input an error message repeats."""


class ApiError(HTTPException):
    """An error to be answered with `status`, in OpenAI's shape.

    An `HTTPException`, since the framework lets no other through while it reads a body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


class ClientGoneError(Exception):
    """The client has closed the connection: nobody is there to be answered."""


def bad_request(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def shown(value: object) -> str:
    """A caller's own value as an error message may repeat it: short, and on one line."""
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    if isinstance(value, str) and len(value) > MAX_ECHOED_CHARS:
        return ascii(value[:MAX_ECHOED_CHARS]) + "..."
    return ascii(value)


def engine_error(error: Exception) -> ApiError:
    """What the engine or the sampling parameters refuse, as an answer."""
    if isinstance(error, SamplingParamsError | RequestError):
        return bad_request(error.param, str(error))
    if isinstance(error, QueueFullError):
        seconds = max(1, math.ceil(error.retry_after_s))
        return ApiError(
            429,
            f"the queue is full; try again in {seconds} s, or start the server with a greater "
            "--max-queued-requests",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )
    if isinstance(error, EngineDrainingError):
        return ApiError(
            503,
            "the server is shutting down and takes no new requests",
            code="server_draining",
            headers={"Connection": "close"},
        )
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine has ended: {error}", code="engine_dead")
    raise TypeError(f"not an engine error: {error!r}") from error


ENGINE_ERRORS = (
    SamplingParamsError,
    RequestError,
    QueueFullError,
    EngineDrainingError,
    EngineDeadError,
)


def validation_error(error: RequestValidationError) -> ApiError:
    """The first mistake in a request body, named by its place."""
    first = error.errors()[0]
    place = [part for part in first["loc"] if part != "body"]
    if not place:
        return bad_request(None, "the request needs a JSON object as its body")
    name = str(place[0])[:MAX_ECHOED_CHARS]
    for part in place[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{str(part)[:MAX_ECHOED_CHARS]}"
    if first["type"] == "extra_forbidden":
        return bad_request(name, f"unknown parameter: {name!a}", code="unknown_parameter")
    if first["type"] == "missing":
        return bad_request(name, f"missing required parameter: {name!a}")
    message = str(first["msg"])
    message = message[0].lower() + message[1:]
    return bad_request(name, f"{name} is {shown(first['input'])}: {message}")


async def answer_api_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def answer_validation_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return validation_error(error).response()


async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """404, 405 and the framework's own refusals."""
    assert isinstance(error, AnyHTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"unknown path: {shown(request.url.path)}"
    elif error.status_code == 405:
        message = f"{request.method[:16]} is not allowed on {shown(request.url.path)}"
    return ApiError(error.status_code, message, headers=error.headers).response()
