"""What was measured, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from client import Measurement
from floor import Floor
from workload import Workload


@dataclass(frozen=True, slots=True)
class Summary:
    """One engine at one concurrency. Throughput per run, latencies over all runs' requests, ms."""

    engine: str
    concurrency: int
    tokens_per_second: tuple[float, ...]
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float

    @property
    def median_throughput(self) -> float:
        return statistics.median(self.tokens_per_second)


def summarise(engine: str, workload: Workload, measurements: Sequence[Measurement]) -> Summary:
    """`measurements` of workloads of the same size as `workload`."""
    timings = [timing for measurement in measurements for timing in measurement.timings]
    first = [timing.time_to_first_token for timing in timings]
    between = [gap for timing in timings for gap in timing.inter_token_latencies]
    return Summary(
        engine=engine,
        concurrency=workload.concurrency,
        tokens_per_second=tuple(workload.num_output_tokens / m.seconds for m in measurements),
        ttft_p50=1000 * percentile(first, 50),
        ttft_p99=1000 * percentile(first, 99),
        itl_p50=1000 * percentile(between, 50),
        itl_p99=1000 * percentile(between, 99),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: a value that was really measured."""
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[max(0, int(rank) - 1)]


def print_table(
    console: Console, workload: Workload, floor: Floor, summaries: Sequence[Summary]
) -> None:
    """One concurrency. `vs first` is a row's throughput over that of the first, which is ours."""
    table = Table(
        title=f"concurrency {workload.concurrency}: {len(workload.requests)} requests, "
        f"{workload.num_prompt_tokens} prompt and {workload.num_output_tokens} output tokens",
        title_justify="left",
    )
    table.add_column("engine")
    for column in (
        "tokens/s",
        "runs",
        "vs first",
        "of floor",
        "TTFT p50",
        "p99 ms",
        "between tokens p50",
        "p99 ms",
    ):
        table.add_column(column, justify="right")
    for summary in summaries:
        table.add_row(
            summary.engine,
            f"{summary.median_throughput:.1f}",
            _spread(summary.tokens_per_second),
            f"{summary.median_throughput / summaries[0].median_throughput:.2f}x",
            f"{summary.median_throughput / floor.tokens_per_second:.0%}",
            f"{summary.ttft_p50:.0f}",
            f"{summary.ttft_p99:.0f}",
            f"{summary.itl_p50:.0f}",
            f"{summary.itl_p99:.0f}",
        )
    table.add_row(
        f"floor: products {floor.product_seconds:.1f} s, reads {floor.read_seconds:.1f} s",
        f"{floor.tokens_per_second:.1f}",
        style="dim",
    )
    console.print(table)


def to_document(
    workload: Workload, floor: Floor, summaries: Sequence[Summary]
) -> dict[str, object]:
    return {
        "concurrency": workload.concurrency,
        "requests": len(workload.requests),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "floor": asdict(floor),
        "engines": [asdict(summary) for summary in summaries],
    }


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return "1"
    return f"{len(values)}: {min(values):.1f}-{max(values):.1f}"
