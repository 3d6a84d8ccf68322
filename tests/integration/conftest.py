"""A tiny random model that can be served, shared by all integration tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_served_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))
