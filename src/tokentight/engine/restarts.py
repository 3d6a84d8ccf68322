"""How often stages may be lost before the engine gives up."""

from __future__ import annotations

import time

from tokentight.engine.errors import EngineDeadError


class RestartBudget:
    """At most `max_restarts` restarts within any `window_s` seconds."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.num_restarts = 0
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._times: list[float] = []

    def spend(self, reason: str) -> None:
        """Count a restart because of `reason`.

        Raises:
            EngineDeadError: it would be one too many.
        """
        now = time.monotonic()
        self._times = [moment for moment in self._times if moment >= now - self._window_s]
        if len(self._times) >= self._max_restarts:
            raise EngineDeadError(
                f"a stage was lost {len(self._times) + 1} times within {self._window_s:.0f} s; "
                f"the last time: {reason}"
            )
        self._times.append(now)
        self.num_restarts += 1
