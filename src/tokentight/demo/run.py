"""The demonstration: start the server, ask everything one at a time, then all at once."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tokentight.demo.client import ask_all
from tokentight.demo.comparison import Comparison, compare
from tokentight.demo.questions import questions
from tokentight.demo.server import free_port, running_server

STARTUP_TIMEOUT = 600.0  # seconds; the first start fetches the model and compiles the kernels


def run_demo(
    model: str, stages: int, number: int, on_progress: Callable[[str, int, int], None]
) -> Comparison:
    """Serve `model` on `stages` stages and compare `number` answers alone and all at once.

    `on_progress` takes what is being done, how much of it is done and how much there is.

    Raises:
        ServerError: when the server does not start.
        RequestError: when a question is not answered.
    """
    asked = questions(number)
    port = free_port()
    command = [
        *(sys.executable, "-m", "tokentight", "serve", model),
        *("--port", str(port), "--served-model-name", "demo"),
        *("--pipeline-parallel-size", str(stages)),
    ]
    on_progress(f"starting {model} on {stages} stages", 0, 0)
    with running_server(command, port, ready_path="/ready", timeout=STARTUP_TIMEOUT):
        passes = []
        for label, concurrency in (("one at a time", 1), (f"all {number} at once", number)):
            answered = 0

            def on_answer(label: str = label) -> None:
                nonlocal answered
                answered += 1
                on_progress(label, answered, number)

            on_progress(label, 0, number)
            passes.append(ask_all(port, "demo", asked, concurrency, on_answer))
    quiet, loaded = passes
    return compare(model, stages, asked, quiet, loaded)
