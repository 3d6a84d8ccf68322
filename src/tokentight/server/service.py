"""What every endpoint of one service shares."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

import tokentight
from tokentight.server.config import ServerConfig
from tokentight.server.engine_api import ServingEngine
from tokentight.server.errors import ApiError, shown
from tokentight.server.metrics import ServerMetrics


@dataclass(frozen=True)
class Service:
    engine: ServingEngine
    config: ServerConfig
    metrics: ServerMetrics
    model_names: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str:
        """Changes when answers may: other code or other kernels."""
        return f"tokentight-{tokentight.__version__}-{self.engine.info.kernels}"

    def served_name(self, asked: str | None) -> str:
        """The model name a response carries.

        Raises:
            ApiError: 404, when the model asked for is not the one served.
        """
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            raise ApiError(
                404,
                f"the model {shown(asked)} does not exist here; served: "
                + ", ".join(self.model_names),
                param="model",
                code="model_not_found",
            )
        return asked


def new_id(prefix: str) -> str:
    """An id of our own. A caller's `X-Request-Id` may come twice, this does not."""
    return f"{prefix}-{uuid.uuid4().hex}"
