"""While the model is being loaded: alive, not ready, and nothing else is served."""

from __future__ import annotations

import asyncio

import httpx
from fake_engine import FakeEngine

from tokentight.server.app import create_app
from tokentight.server.config import ServerConfig
from tokentight.server.gateway import Gateway


def test_the_gateway_passes_on_once_there_is_an_application() -> None:
    async def scenario() -> None:
        gateway = Gateway()
        transport = httpx.ASGITransport(gateway)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/health")).status_code == 200
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert ready.json()["status"] == "starting"
            refused = await client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_starting"
            assert refused.headers["retry-after"] == "1"
            gateway.app = create_app(FakeEngine(), ServerConfig())
            assert (await client.get("/ready")).status_code == 200
            served = await client.post("/v1/completions", json={"prompt": "a"})
            assert served.status_code == 200

    asyncio.run(scenario())
