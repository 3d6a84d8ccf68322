"""Why the engine would not, or no longer, serve a request."""

from __future__ import annotations


class RequestError(ValueError):
    """The request itself cannot be served; `param` names what is wrong with it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again after `retry_after_s` seconds."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class EngineDeadError(RuntimeError):
    """The engine has ended and cannot serve."""


class EngineDrainingError(RuntimeError):
    """The engine finishes what it has and takes nothing new."""
