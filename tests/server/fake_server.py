"""`tokentight serve` as a process of its own, over the stand-in engine.

Arguments: the port, seconds to drain, and `broken` for an engine that does not start. The engine
makes a token every 20 ms.
"""

from __future__ import annotations

import sys

from fake_engine import FakeEngine

from tokentight.server.config import ServerConfig
from tokentight.server.request_log import log_to_stderr
from tokentight.server.run import StartError, serve_with


async def start() -> FakeEngine:
    if sys.argv[3:] == ["broken"]:
        raise StartError("the engine did not start: the model needs 9 GiB, 2 GiB are free")
    return FakeEngine(max_model_len=100_000, step_s=0.02)


log_to_stderr()
sys.exit(serve_with(start, ServerConfig(port=int(sys.argv[1]), drain_timeout_s=float(sys.argv[2]))))
