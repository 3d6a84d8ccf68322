"""Serving throughput and latency, ours against peers on the same weights, in the same run.

Engines take turns, each with the machine to itself: ours, a peer, ours, a peer, as often as
`--runs` says. Next to what was measured stands the floor, the least time that this machine's own
rates allow for the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from client import BenchmarkError, Measurement
from floor import ModelSize, floor_of, read_model_size
from machine import BUSY, MachineRates, describe_machine, measure_machine
from peers import DEFAULT_PEERS, PEERS, Engine, choose_engines
from table import print_table, summarise, to_document
from tokentight.demo.server import ServerError
from workload import make_workload

Results = dict[tuple[str, int], list[Measurement]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=3, help="turns of every engine")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2], help="of our engine")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(DEFAULT_PEERS))
    parser.add_argument("--quick", action="store_true", help="one run at concurrency 1 and 8")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--model", type=Path, help="a Llama-like directory of safetensors")
    parser.add_argument("--peers-directory", type=Path, default=Path(".peers"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.concurrency = 1, [1, 8]
    return arguments


def exported_demo_model(directory: Path) -> Path:
    """The demo model as float32 safetensors, made once."""
    target = directory / "models" / "smollm2-135m"
    if not (target / "config.json").exists():
        script = Path(__file__).with_name("export_model.py")
        subprocess.run([sys.executable, str(script), str(target)], check=True)
    return target


def run_engine(
    engine: Engine, run: int, concurrencies: Sequence[int], vocab_size: int, results: Results
) -> None:
    """One turn of one engine, its measurements added to `results`."""
    workloads = [make_workload(concurrency, run, vocab_size) for concurrency in concurrencies]
    for workload, measurement in zip(workloads, engine.run(workloads), strict=True):
        results.setdefault((engine.name, workload.concurrency), []).append(measurement)
        rate = workload.num_output_tokens / measurement.seconds
        print(
            f"run {run + 1}, {engine.name}, concurrency {workload.concurrency}: "
            f"{rate:.1f} tokens/s, {measurement.seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )


def take_turns(
    engines: Sequence[Engine], runs: int, concurrencies: Sequence[int], vocab_size: int
) -> tuple[Results, list[str]]:
    """All turns of all engines; the names of those that failed, which get no further turn."""
    results: Results = {}
    failed: list[str] = []
    for run in range(runs):
        for engine in engines:
            if engine.name in failed or (run and not engine.repeats):
                continue
            try:
                run_engine(engine, run, concurrencies, vocab_size, results)
            except (BenchmarkError, ServerError) as error:
                failed.append(engine.name)
                print(f"{engine.name} failed and is left out from here: {error}", file=sys.stderr)
    return results, failed


def report(
    arguments: argparse.Namespace,
    names: Sequence[str],
    size: ModelSize,
    rates: MachineRates,
    described: dict[str, object],
    results: Results,
) -> None:
    """Tables on standard output and, where asked for, JSON in a file."""
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(
        f"{described['cpu']}, {described['cores']} cores; torch.mm {rates.flops / 1e9:.0f} "
        f"GFLOP/s, reads {rates.read_bandwidth / 1e9:.1f} GB/s"
    )
    documents = []
    for concurrency in arguments.concurrency:
        workload = make_workload(concurrency, 0, size.vocab_size)
        summaries = [
            summarise(name, workload, results[name, concurrency])
            for name in names
            if (name, concurrency) in results
        ]
        if summaries:
            floor = floor_of(workload, size, rates)
            print_table(console, workload, floor, summaries)
            documents.append(to_document(workload, floor, summaries))
    if arguments.json:
        document = {"machine": {**described, **asdict(rates)}, "results": documents}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    # As on Ctrl-C: the server that is being measured is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parse_arguments()
    model = arguments.model or exported_demo_model(arguments.peers_directory)
    size = read_model_size(model)
    engines, notes = choose_engines(
        model, arguments.peers, arguments.stages, arguments.peers_directory
    )
    described = describe_machine()
    if os.getloadavg()[0] > BUSY:
        notes.append(f"this machine is busy (load {os.getloadavg()[0]:.2f}): numbers will be off")
    for note in notes:
        print(note, file=sys.stderr)
    rates = measure_machine()
    results, failed = take_turns(engines, arguments.runs, arguments.concurrency, size.vocab_size)
    rates = rates.best(measure_machine())
    report(arguments, [engine.name for engine in engines], size, rates, described, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
