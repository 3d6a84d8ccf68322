"""`tokentight demo`."""

from __future__ import annotations

import json
import signal
import sys
from typing import Annotated

import typer

EXIT_DIFFERENT = 1


def demo(
    model: Annotated[
        str, typer.Argument(help="Built-in alias, model directory, GGUF file or hub id.")
    ] = "smollm2-135m",
    pipeline_parallel_size: Annotated[
        int,
        typer.Option(
            "--pipeline-parallel-size", "-pp", min=1, help="Processes to split the layers over."
        ),
    ] = 2,
    requests: Annotated[int, typer.Option(min=2, help="Questions to ask.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Ask a real model the same questions alone and all at once, and compare every bit.

    Starts a server of its own on a free port of this machine and ends it again. The questions are
    asked one at a time, then all together, greedy and seeded sampling mixed; token ids and
    logprobs of each must be the same. Exits with 1 when any differs.
    """
    from rich.console import Console

    from tokentight.demo.client import RequestError
    from tokentight.demo.run import run_demo
    from tokentight.demo.server import ServerError
    from tokentight.demo.terminal import progress, show

    # As on Ctrl-C: the server is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    errors = Console(stderr=True)
    try:
        with progress(errors) as on_progress:
            comparison = run_demo(model, pipeline_parallel_size, requests, on_progress)
    except (ServerError, RequestError) as error:
        errors.print(f"tokentight demo: {error}", markup=False, highlight=False, style="red")
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(comparison.to_json(), indent=2))
    else:
        show(comparison, Console())
    if comparison.differences:
        raise typer.Exit(EXIT_DIFFERENT)
