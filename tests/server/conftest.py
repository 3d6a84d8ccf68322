"""Fixtures of the service's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from running_service import RunningService, running_service

from tokentight.server.config import ServerConfig

Serve = Callable[..., RunningService]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Run a service over a stand-in engine until the test ends: `serve(engine, **settings)`."""
    with contextlib.ExitStack() as stack:

        def start(engine: FakeEngine, **settings: object) -> RunningService:
            async def started() -> FakeEngine:
                return engine

            config = ServerConfig(port=0, **settings)  # type: ignore[arg-type]
            return stack.enter_context(running_service(started, config))

        yield start


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """A service over a stand-in engine, shared by the tests of a module."""

    async def started() -> FakeEngine:
        return FakeEngine()

    with running_service(started, ServerConfig(port=0)) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer and a chat template."""
    from tiny_served_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-served-model"))


@pytest.fixture(scope="module")
def real_service(tiny_model: Path) -> Iterator[RunningService]:
    """A service over the real engine and the tiny model, shared by the tests of a module."""
    from tiny_served_model import tiny_engine_config

    from tokentight.engine.async_engine import AsyncEngine

    config = ServerConfig(port=0, served_model_names=("tiny",))
    engine_config = tiny_engine_config(tiny_model)
    with running_service(lambda: AsyncEngine.start(engine_config), config) as running:
        yield running
