"""The promise: every answer under load has the bits of the answer to the request alone.

Workloads are drawn by hypothesis and run on real engines: native and reference kernels, one to
three stages (more than one: real processes), one and two threads, budgets that chunk prompts,
pools so small that requests are preempted, prefix caches on, off and hit, requests that arrive
late or are aborted. The answers alone come from one engine: one stage, one thread, no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bitwise import answer_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from staggered import Arrival, run_staggered
from tiny_served_model import tiny_engine_config

from tokentight.engine.engine import Engine
from tokentight.sampling.params import SamplingParams

pytestmark = pytest.mark.integration

VOCAB_SIZE = 256  # bytes; the special tokens above would end answers early
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # positions x layers x (K, V) x heads x head_dim x float32
ONE_REQUEST = 16 * BLOCK_BYTES

EngineOf = Callable[..., Engine]

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 24),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 1, 5, 400]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {}, {65: 5.0, 66: -100.0}]),
    seed=st.integers(0, 2**64 - 1),
    stop=st.sampled_from([(), (), ("a",), ("xy", "z")]),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    ignore_eos=st.booleans(),
)

# A shared stem, so that the prefix cache is hit, with tails that part at any position.
prompts = st.builds(
    lambda shared, tail: tuple((7 * i) % 251 for i in range(shared)) + tuple(tail),
    st.sampled_from([0, 0, 16, 40, 100]),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60),
)

arrivals = st.builds(
    Arrival,
    prompt=prompts,
    params=params,
    step=st.integers(0, 12),
    aborted=st.one_of(st.none(), st.none(), st.integers(1, 30)),
)

workloads = st.lists(arrivals, min_size=2, max_size=12)

few = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def engine_of(tiny_model: Path) -> Iterator[EngineOf]:
    """Engines by their settings, started once."""
    engines: dict[tuple[tuple[str, object], ...], Engine] = {}

    def get(**changes: object) -> Engine:
        key = tuple(sorted(changes.items()))
        if key not in engines:
            engines[key] = Engine(tiny_engine_config(tiny_model, **changes))
        return engines[key]

    yield get
    for engine in engines.values():
        engine.close()


CASES: dict[str, dict[str, object]] = {
    "one stage": {},
    "two threads": {"num_threads": 2},
    "chunks": {"max_num_batched_tokens": 20},
    "no prefix cache": {"enable_prefix_caching": False},
    "preemption": {"kv_cache_memory": ONE_REQUEST + 4 * BLOCK_BYTES},
    "preemption and chunks, no cache": {
        "kv_cache_memory": ONE_REQUEST,
        "max_num_batched_tokens": 9,
        "enable_prefix_caching": False,
    },
    "two stages": {"pipeline_parallel_size": 2},
    "three stages": {"pipeline_parallel_size": 3},
    "two stages, two threads each, chunks": {
        "pipeline_parallel_size": 2,
        "num_threads": 4,
        "max_num_batched_tokens": 33,
    },
    "three stages, preemption, chunks": {
        "pipeline_parallel_size": 3,
        "kv_cache_memory": ONE_REQUEST + 4 * BLOCK_BYTES,
        "max_num_batched_tokens": 24,
    },
}


def assert_as_if_alone(engine: Engine, quiet: Engine, workload: list[Arrival]) -> None:
    answers = run_staggered(engine, workload)
    for arrival, answer in zip(workload, answers, strict=True):
        if answer is None:
            assert arrival.aborted is not None, "a request was lost"
            continue
        [alone] = quiet.generate([arrival.prompt], arrival.params)
        assert answer_bits(answer) == answer_bits(alone)
    assert engine.stats().audit_violations == 0
    assert engine.stats().kv_cache_usage == 0, "blocks leaked"


@pytest.mark.parametrize("case", CASES)
@given(workload=workloads)
@settings(few, max_examples=20)
def test_native_answers_under_load_have_the_bits_of_answers_alone(
    engine_of: EngineOf, case: str, workload: list[Arrival]
) -> None:
    quiet = engine_of(kernels="native", enable_prefix_caching=False, max_num_batched_tokens=512)
    engine = engine_of(kernels="native", **CASES[case])
    assert engine.info.promise_holds
    assert engine.info.kernels == "native"
    assert_as_if_alone(engine, quiet, workload)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "case", ["one stage", "preemption", "chunks", "two stages", "three stages"]
)
@given(workload=workloads)
@settings(few, max_examples=5)
def test_reference_answers_under_load_have_the_bits_of_answers_alone(
    engine_of: EngineOf, case: str, num_threads: int, workload: list[Arrival]
) -> None:
    """torch's bits hold for the thread count at hand, so alone is measured with as many."""
    stages = CASES[case].get("pipeline_parallel_size", 1)
    assert isinstance(stages, int)
    if stages * num_threads > 3:
        pytest.skip("torch's threads would outnumber the cores of a small machine several times")
    quiet = engine_of(kernels="reference", enable_prefix_caching=False, num_threads=num_threads)
    changes = {**CASES[case], "num_threads": num_threads * stages}
    engine = engine_of(kernels="reference", **changes)
    assert engine.info.promise_holds
    assert engine.info.kernels == "reference"
    torch.set_num_threads(num_threads)  # engines of this process share torch's threads
    assert_as_if_alone(engine, quiet, workload)


def test_the_cases_do_what_they_are_named_for(engine_of: EngineOf) -> None:
    """Chunking, preemption and cache hits really happen, or the property above says little."""
    workload = [
        Arrival(
            (*(7 * i % 251 for i in range(100)), index),
            SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
            step=2 * index,
        )
        for index in range(6)
    ]
    for case in ("preemption", "three stages, preemption, chunks"):
        engine = engine_of(kernels="native", **CASES[case])
        before = engine.stats()
        run_staggered(engine, workload)
        after = engine.stats()
        assert after.num_preemptions > before.num_preemptions, case
        assert after.prefix_cache_hits > before.prefix_cache_hits, case


def test_prompt_logprobs_of_cached_positions_are_recomputed(engine_of: EngineOf) -> None:
    engine = engine_of(kernels="native")
    prompt = tuple(range(80))
    [plain] = engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    [first] = engine.generate([prompt], wanted)
    [second] = engine.generate([prompt], wanted)
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 80
    assert all(entry is not None for entry in first.prompt_logprobs[1:])
    assert answer_bits(first) == answer_bits(second)
    assert first.token_ids == plain.token_ids


def test_a_request_without_a_seed_is_one_draw_of_many(engine_of: EngineOf) -> None:
    """A drawn seed lives in the ledger: it survives preemption, and differs between requests."""
    engine = engine_of(kernels="native")
    wanted = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
    answers = engine.generate([(1, 2, 3)] * 8, wanted)
    assert len({answer.token_ids for answer in answers}) > 1
