"""The service as a process: bind, start the engine, say so, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from tokentight.engine.config import EngineConfig
from tokentight.server.app import create_app
from tokentight.server.config import ServerConfig
from tokentight.server.engine_api import EngineInfo, ServingEngine
from tokentight.server.gateway import Gateway
from tokentight.server.request_log import log_to_stderr

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_FORCED = 130
KEEP_ALIVE_S = 75
SEND_BUFFER_BYTES = 256 * 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

StartEngine = Callable[[], Awaitable[ServingEngine]]


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal says to stop. Returns the process's exit code.

    The first SIGINT or SIGTERM drains: open requests finish, new ones are refused. A second one
    ends the process at once.
    """
    from setproctitle import setproctitle

    setproctitle("tokentight: engine")
    log_to_stderr()
    return serve_with(lambda: _start_engine(engine_config), server_config)


async def _start_engine(config: EngineConfig) -> ServingEngine:
    from tokentight.engine.async_engine import AsyncEngine
    from tokentight.kernels.errors import NativeUnavailable
    from tokentight.models.errors import DemoModelError
    from tokentight.pipeline.interface import PipelineStartError
    from tokentight.server.loading import loading_bar

    expected = (ValueError, OSError, MemoryError, DemoModelError, NativeUnavailable)
    try:
        with loading_bar() as progress:
            return await AsyncEngine.start(config, progress)
    except (*expected, PipelineStartError) as error:
        raise StartError(f"the engine did not start: {error}") from error


def serve_with(start_engine: StartEngine, config: ServerConfig) -> int:
    """`serve`, over whatever engine `start_engine` starts."""
    try:
        listener = bound_socket(config)
    except OSError as error:
        _say(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; "
            "choose another --port (0 takes a free one) or --host"
        )
        return EXIT_FAILED
    with listener:
        return asyncio.run(_serve(start_engine, config, listener))


def bound_socket(config: ServerConfig) -> socket.socket:
    """A listening socket, so that a port in use shows before a model is loaded.

    Raises:
        OSError: the address cannot be bound.
    """
    found = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these. What a client does not read waits in a buffer of fixed size.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # The kernel drops those whose peer takes nothing any more.
            milliseconds = int(config.client_timeout_s * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, which stops listening before it drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(start_engine: StartEngine, config: ServerConfig, listener: socket.socket) -> int:
    gateway = Gateway()
    server = _HttpServer(
        uvicorn.Config(
            gateway,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(config.client_timeout_s)),
        )
    )
    stop = asyncio.Event()
    _stop_on_signals(stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        engine = await _started(start_engine, stop)
        if engine is None:
            _say("stopped before the model was loaded")
            os._exit(0)  # loading runs in a thread, which nothing can stop
        try:
            gateway.app = create_app(engine, config)
            _say(_ready_line(engine.info, config, listener))
            await stop.wait()
            await _drain(engine, config.drain_timeout_s)
            server.should_exit = True
            await serving
        finally:
            await engine.shutdown()
        return 0
    except StartError as error:
        _say(str(error))
        return EXIT_FAILED
    finally:
        server.should_exit = True
        await serving


class StartError(RuntimeError):
    """The engine did not start, for a reason its message tells."""


async def _started(start_engine: StartEngine, stop: asyncio.Event) -> ServingEngine | None:
    """The engine, or None when a signal came first."""
    starting = asyncio.ensure_future(start_engine())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return None
        return starting.result()
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


async def _drain(engine: ServingEngine, timeout_s: float) -> None:
    _say("stopping: open requests finish, new ones are refused; a second signal ends at once")
    try:
        await asyncio.wait_for(engine.drain(), timeout_s)
    except asyncio.TimeoutError:
        logger.warning("requests still open after %g s of draining are aborted", timeout_s)
        await engine.shutdown()


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first signal sets `stop`; the next one ends the process, however busy the loop is."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: os._exit(EXIT_FORCED))

    for number in _SIGNALS:
        loop.add_signal_handler(number, first)


def _ready_line(info: EngineInfo, config: ServerConfig, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    stages = "1 stage" if info.num_stages == 1 else f"{info.num_stages} stages"
    promise = "" if info.promise_holds else "; answers may depend on load here, see the log"
    return (
        f"ready: http://{host}:{port} serves {info.model} "
        f"({stages}, {info.kernels} kernels, context {info.max_model_len} tokens{promise})"
    )


def _say(line: str) -> None:
    print(f"tokentight: {line}", file=sys.stderr, flush=True)
