from __future__ import annotations

import pytest

from tokentight.kernels.interface import Kernels
from tokentight.kernels.select import load_kernels


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each of the kernels in turn."""
    return load_kernels(request.param, 1)


@pytest.fixture
def reference_kernels() -> Kernels:
    return load_kernels("reference", 1)
