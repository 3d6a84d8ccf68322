"""The engines of a comparison, and how each one runs a list of workloads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from client import BenchmarkError, Measurement, RequestTiming, measure
from servers import ServedEngine, tokentight, vllm
from tokentight.demo.server import free_port, running_server
from workload import FIRST_ORDINARY_TOKEN, Request, Workload, to_json

PEERS = ("vllm", "vllm-pp2", "transformers")
DEFAULT_PEERS = ("vllm", "transformers")
WARM_UP = Workload(
    4, tuple(Request((FIRST_ORDINARY_TOKEN + i,) * (16 + 64 * i), 8) for i in range(4))
)


@dataclass(frozen=True, slots=True)
class Engine:
    """Something that can be measured. `run` yields one measurement per workload.

    `repeats` is False for what is too slow to be measured in every run.
    """

    name: str
    run: Callable[[Sequence[Workload]], Iterator[Measurement]]
    repeats: bool = True


def choose_engines(
    model: Path, peers: Sequence[str], stages: Sequence[int], directory: Path
) -> tuple[list[Engine], list[str]]:
    """Ours and the peers in turn, and one line for each peer that is not installed."""
    ours = [served(tokentight(model, number)) for number in stages]
    theirs, notes = [], []
    executable = directory / "vllm" / "bin" / "vllm"
    for peer in peers:
        if peer == "transformers":
            theirs.append(offline_transformers(model))
        elif not (directory / "vllm" / ".installed").exists():
            notes.append(f"{peer} is not installed in {directory / 'vllm'}: make bench-peers")
        else:
            theirs.append(served(vllm(model, 2 if peer == "vllm-pp2" else 1, executable)))
    engines = []
    for turn in range(max(len(ours), len(theirs))):
        engines += ours[turn : turn + 1] + theirs[turn : turn + 1]
    return engines, notes


def served(engine: ServedEngine) -> Engine:
    """An engine behind its HTTP API: one server for all workloads, warmed up first."""

    def run(workloads: Sequence[Workload]) -> Iterator[Measurement]:
        port = free_port()
        with running_server(
            engine.command(port),
            port,
            ready_path=engine.ready_path,
            timeout=engine.startup_timeout,
            environment=engine.environment,
        ):
            measure(port, WARM_UP)
            for workload in workloads:
                yield measure(port, workload)

    return Engine(engine.name, run)


def offline_transformers(model: Path) -> Engine:
    """`transformers` in a process of its own per workload, without HTTP."""
    script = Path(__file__).with_name("transformers_peer.py")

    def run(workloads: Sequence[Workload]) -> Iterator[Measurement]:
        for workload in workloads:
            result = subprocess.run(
                [sys.executable, str(script), str(model)],
                input=to_json(workload),
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode:
                raise BenchmarkError(f"transformers failed:\n{result.stderr[-2000:]}")
            document = json.loads(result.stdout.splitlines()[-1])
            timings = tuple(RequestTiming(t[0], tuple(t[1:])) for t in document["timings"])
            if sum(len(t.token_times) for t in timings) != workload.num_output_tokens:
                raise BenchmarkError("transformers answered with another number of tokens")
            yield Measurement(document["seconds"], timings)

    return Engine("transformers", run, repeats=False)
