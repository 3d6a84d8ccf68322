"""Fixtures of the service's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from fake_engine import FakeEngine
from running_service import RunningService, running_service

from tokentight.server.config import ServerConfig
from tokentight.server.engine_api import ServingEngine

Serve = Callable[..., RunningService]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Run a service until the test ends: `serve(engine, **settings)`."""
    with contextlib.ExitStack() as stack:

        def start(engine: ServingEngine, **settings: object) -> RunningService:
            config = ServerConfig(port=0, **settings)  # type: ignore[arg-type]
            return stack.enter_context(running_service(engine, config))

        yield start


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """A service over the stand-in engine, shared by the tests of a module."""
    with running_service(FakeEngine(), ServerConfig(port=0)) as running:
        yield running
