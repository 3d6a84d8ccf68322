"""`/health`, `/ready`, `/version`, `/metrics` and `/v1/models`: about the service itself."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

import tokentight
from tokentight.server.engine_api import EngineStatus
from tokentight.server.service import Service


def probes_router(service: Service) -> APIRouter:
    router = APIRouter()
    engine = service.engine

    def state() -> dict[str, str]:
        return {"status": engine.status.value, "detail": engine.status_detail}

    @router.get("/health", response_model=None)
    async def health() -> JSONResponse:
        """200 as long as the engine lives, also while it starts, recovers or drains."""
        alive = engine.status is not EngineStatus.DEAD
        return JSONResponse(state(), status_code=200 if alive else 503)

    @router.get("/ready", response_model=None)
    async def ready() -> JSONResponse:
        """200 when the model is loaded and its stages answer."""
        is_ready = engine.status is EngineStatus.READY
        return JSONResponse(state(), status_code=200 if is_ready else 503)

    @router.get("/version", response_model=None)
    async def version() -> dict[str, str]:
        return {"version": tokentight.__version__}

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models", response_model=None)
    async def models() -> dict[str, Any]:
        data = [_model_card(service, name) for name in service.model_names]
        return {"object": "list", "data": data}

    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> dict[str, Any]:
        return _model_card(service, service.served_name(name))

    return router


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tokentight",
        "root": service.engine.info.model,
        "parent": None,
        "max_model_len": service.engine.info.max_model_len,
    }
