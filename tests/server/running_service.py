"""A service on a real socket, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from tokentight.server.app import create_app
from tokentight.server.config import ServerConfig
from tokentight.server.engine_api import ServingEngine
from tokentight.server.run import bound_socket

StartEngine = Callable[[], Awaitable[ServingEngine]]


@dataclass(frozen=True)
class RunningService:
    engine: Any
    port: int
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str, labels: str = "") -> float:
        """The value of `tokentight:name` with exactly these labels, before the model's."""
        lines = self.client.get("/metrics").text.splitlines()
        start = f"tokentight:{name}{{{labels}model_name="
        (line,) = (line for line in lines if line.startswith(start))
        return float(line.rsplit(" ", 1)[1])

    def wait_until_idle(self) -> None:
        """Until the engine has no request and every KV block is free."""
        deadline = time.monotonic() + 60
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(self.metric(name) for name in names):
            assert time.monotonic() < deadline, "requests or blocks are left"
            time.sleep(0.02)


async def _serve(
    start_engine: StartEngine,
    config: ServerConfig,
    started: Future[tuple[ServingEngine, uvicorn.Server, int]],
) -> None:
    with bound_socket(config) as listener:
        try:
            engine = await start_engine()
            app = create_app(engine, config)
        except BaseException as error:
            started.set_exception(error)
            return
        server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=5)
        )
        started.set_result((engine, server, listener.getsockname()[1]))
        try:
            await server.serve(sockets=[listener])
        finally:
            await engine.shutdown()


@contextlib.contextmanager
def running_service(start_engine: StartEngine, config: ServerConfig) -> Iterator[RunningService]:
    """The engine lives on the loop of the server's thread; the listening socket queues early
    requests, so there is nothing to wait for."""
    started: Future[tuple[ServingEngine, uvicorn.Server, int]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(start_engine, config, started)))
    thread.start()
    try:
        engine, server, port = started.result(timeout=120)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield RunningService(engine, port, client)
        finally:
            server.should_exit = True
    finally:
        thread.join()
