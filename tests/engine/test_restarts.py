"""The budget of restarts."""

from __future__ import annotations

import pytest

from tokentight.engine import restarts
from tokentight.engine.errors import EngineDeadError
from tokentight.engine.restarts import RestartBudget


def test_restarts_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now)
    budget = RestartBudget(max_restarts=2, window_s=60)
    budget.spend("first")
    now = 1030.0
    budget.spend("second")
    with pytest.raises(EngineDeadError, match="lost 3 times within 60 s; the last time: third"):
        budget.spend("third")
    now = 1061.0
    budget.spend("fourth")
    assert budget.num_restarts == 3
