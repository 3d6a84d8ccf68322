"""The benchmark counts, times and bounds as it says, on cases worked out by hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("workload", "servers", "client", "machine", "floor", "table", "setup_vllm")


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[dict[str, ModuleType]]:
    """The scripts' modules, imported as the scripts import them and forgotten afterwards."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in MODULES:
            sys.modules.pop(name, None)


def test_runs_have_the_same_amount_of_work_and_prompts_of_their_own(
    benchmarks: dict[str, ModuleType],
) -> None:
    """So that runs compare, and that no engine finds an earlier run's prompts in its cache."""
    make = benchmarks["workload"].make_workload
    for concurrency, number in ((1, 3), (8, 16), (32, 32), (128, 128)):
        first, again, second = (make(concurrency, run, 49152) for run in (0, 0, 1))
        assert first == again
        assert len(first.requests) == number
        assert [len(r.prompt) for r in first.requests] == [len(r.prompt) for r in second.requests]
        assert {r.prompt for r in first.requests}.isdisjoint(r.prompt for r in second.requests)
        assert all(128 <= len(r.prompt) <= 384 for r in first.requests)
        assert all(32 <= r.num_output_tokens <= 96 for r in first.requests)
    from_json, to_json = benchmarks["workload"].from_json, benchmarks["workload"].to_json
    assert from_json(to_json(first)) == first


def test_latencies_of_chunks_with_several_tokens(benchmarks: dict[str, ModuleType]) -> None:
    """A chunk's tokens share its gap, so that a server cannot look quick by sending in lumps."""
    timing = benchmarks["client"].RequestTiming(1.0, (1.5, 2.0, 3.0, 3.0, 3.0, 3.0, 3.5))
    assert timing.time_to_first_token == 0.5
    assert timing.inter_token_latencies == [0.5, 0.25, 0.25, 0.25, 0.25, 0.5]


def test_percentiles_are_measured_values(benchmarks: dict[str, ModuleType]) -> None:
    percentile = benchmarks["table"].percentile
    values = [float(v) for v in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99)) == (50.0, 99.0)
    assert percentile([3.0], 99) == percentile([3.0], 50) == 3.0


def test_the_floor_counts_each_product_and_read_once(benchmarks: dict[str, ModuleType]) -> None:
    """Two requests one after the other: 10 prompt and 3 output tokens, then 20 and 2."""
    workload, floor = benchmarks["workload"], benchmarks["floor"]
    requests = (workload.Request((1,) * 10, 3), workload.Request((1,) * 20, 2))
    size = floor.ModelSize(
        layer_parameters=1000, head_parameters=500, kv_values_per_token=7, vocab_size=50
    )
    found = floor.floor_of(
        workload.Workload(1, requests),
        size,
        benchmarks["machine"].MachineRates(flops=1.0, read_bandwidth=1.0),
    )
    # The last output token is never computed: 12 and 21 tokens through the layers, 5 logit rows.
    assert found.product_seconds == 2 * (1000 * (12 + 21) + 500 * 5)
    # Five steps read the weights. KV: 10, 11, 12 and 20, 21 tokens.
    assert found.read_seconds == 4 * (5 * 1500 + 7 * (10 + 11 + 12 + 20 + 21))
    assert found.tokens_per_second == pytest.approx(5 / found.seconds)


def test_the_shortest_schedule_fills_free_slots(benchmarks: dict[str, ModuleType]) -> None:
    workload, floor = benchmarks["workload"], benchmarks["floor"]
    requests = tuple(workload.Request((1,), number) for number in (4, 2, 3, 1))
    steps = [floor.num_steps(workload.Workload(c, requests)) for c in (1, 2, 4)]
    assert steps == [10, 5, 4]


def test_vllm_gets_all_cores_divided_among_its_stages(
    benchmarks: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    vllm = benchmarks["servers"].vllm
    bound = [
        vllm(Path("m"), stages, Path("v")).environment["VLLM_CPU_OMP_THREADS_BIND"]
        for stages in (1, 2)
    ]
    assert bound == ["0,1,2,3", "0,1|2,3"]
