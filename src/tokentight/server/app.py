"""The service as an ASGI application over an engine that is started."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

import tokentight
from tokentight.server.chat import chat_router
from tokentight.server.completions import completions_router
from tokentight.server.config import ServerConfig
from tokentight.server.engine_api import ServingEngine
from tokentight.server.errors import (
    ApiError,
    ClientGoneError,
    answer_api_error,
    answer_http_error,
    answer_validation_error,
)
from tokentight.server.metrics import ServerMetrics
from tokentight.server.middleware import ApiKeys, BodyLimit, RequestContext
from tokentight.server.probes import probes_router
from tokentight.server.service import Service
from tokentight.server.tokenization import tokenization_router

CLIENT_CLOSED_REQUEST = 499
"""For the log alone: nobody is there to read it."""


def create_app(engine: ServingEngine, config: ServerConfig) -> FastAPI:
    """The OpenAI-compatible service. It keeps no state but its metrics."""
    names = config.served_model_names or (engine.info.model,)
    service = Service(engine, config, ServerMetrics(engine, names[0]), names)
    app = FastAPI(
        title="tokentight",
        version=tokentight.__version__,
        description="OpenAI-compatible LLM serving whose answers do not depend on load.",
        redirect_slashes=False,
        docs_url=None,  # the pages would load scripts from elsewhere
        redoc_url=None,
    )
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(tokenization_router(service))
    app.include_router(probes_router(service))
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(ClientGoneError, _note_client_gone)
    # The last one added is the outermost.
    app.add_middleware(
        BodyLimit, max_bytes=config.max_body_bytes, timeout_s=config.client_timeout_s
    )
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    app.add_middleware(RequestContext, engine=engine)
    return app


async def _note_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
