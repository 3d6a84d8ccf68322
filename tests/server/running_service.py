"""A service on a real socket, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import uvicorn

from tokentight.server.app import create_app
from tokentight.server.config import ServerConfig
from tokentight.server.engine_api import ServingEngine
from tokentight.server.run import bound_socket


@dataclass(frozen=True)
class RunningService:
    engine: ServingEngine
    url: str
    port: int
    client: httpx.Client


@contextlib.contextmanager
def running_service(engine: ServingEngine, config: ServerConfig) -> Iterator[RunningService]:
    with bound_socket(config) as listener:
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(engine, config),
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=5,
            )
        )
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(base_url=url, timeout=30) as client:
                yield RunningService(engine, url, port, client)
        finally:
            server.should_exit = True
            thread.join()
