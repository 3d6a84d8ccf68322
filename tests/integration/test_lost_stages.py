"""A stage killed in mid-flight costs time and no tokens; one that keeps dying ends the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bitwise import answer_bits
from tiny_served_model import tiny_engine_config

from tokentight.engine.async_engine import AsyncEngine
from tokentight.engine.engine import Engine, _completion
from tokentight.engine.errors import EngineDeadError
from tokentight.engine.merge import merge
from tokentight.engine.outputs import RequestOutput
from tokentight.engine.request import GenerationRequest
from tokentight.engine.status import EngineStatus
from tokentight.pipeline import codec, transport
from tokentight.pipeline.processes import ProcessPipeline
from tokentight.sampling.params import SamplingParams

pytestmark = pytest.mark.integration

REQUESTS = [
    GenerationRequest(
        str(index),
        (*(7 * i % 251 for i in range(30 + 9 * index)), index),
        SamplingParams(
            max_tokens=30,
            temperature=0.8 * (index % 2),
            seed=index,
            logprobs=1,
            prompt_logprobs=0 if index % 3 == 0 else None,
            ignore_eos=True,
        ),
    )
    for index in range(8)
]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    config = tiny_engine_config(
        tiny_model, pipeline_parallel_size=3, kernels="native", max_num_batched_tokens=48
    )
    with Engine(config) as started:
        yield started


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[tuple[object, ...]]:
    with Engine(tiny_engine_config(tiny_model, kernels="native")) as quiet:
        return [
            answer_bits(quiet.generate([request.prompt_token_ids], request.params)[0])
            for request in REQUESTS
        ]


def pipeline_of(engine: Engine) -> ProcessPipeline:
    pipeline = engine._parts.pipeline
    assert isinstance(pipeline, ProcessPipeline)
    return pipeline


def run_killing(engine: Engine, kills: dict[int, int]) -> list[tuple[object, ...]]:
    """Run all requests; `kills` says which stage to kill before which step."""
    core, admission = engine._parts.core, engine._parts.admission
    for request in REQUESTS:
        core.add(request, admission.max_num_tokens(request))
    first = min(core._requests)
    outputs: dict[int, RequestOutput] = {}
    step = 0
    while core.has_work:
        if step in kills:
            os.kill(pipeline_of(engine).pids[kills[step]], signal.SIGKILL)
        for update in core.step():
            index = update.request_number - first
            known = outputs.get(index)
            outputs[index] = merge(known, update.output) if known else update.output
        step += 1
    return [answer_bits(_completion(r, outputs[i])) for i, r in enumerate(REQUESTS)]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_request_finishes_with_the_bits_it_would_have_had(
    engine: Engine, alone: list[tuple[object, ...]], stage: int
) -> None:
    before = pipeline_of(engine).pids
    assert run_killing(engine, {12: stage}) == alone
    after = pipeline_of(engine).pids
    assert [old == new for old, new in zip(before, after, strict=True)] == [
        index != stage for index in range(3)
    ]
    assert engine.stats().stage_restarts == 1
    # And once more on the restarted stage, now with a prefix cache that was filled after it.
    assert run_killing(engine, {}) == alone


def test_two_stages_lost_one_after_another(engine: Engine, alone: list[tuple[object, ...]]) -> None:
    assert run_killing(engine, {5: 2, 25: 0}) == alone
    assert engine.stats().stage_restarts == 2


def test_a_stage_that_keeps_dying_ends_the_engine_and_says_so(engine: Engine) -> None:
    with pytest.raises(EngineDeadError, match=r"lost 4 times .* stage 2 of 3: .* signal 9"):
        run_killing(engine, dict.fromkeys(range(2, 2000), 1))


def test_a_stage_that_is_sent_a_damaged_plan_refuses_it_and_says_why(engine: Engine) -> None:
    pipeline = pipeline_of(engine)
    transport.send_plan(pipeline._first_stage, bytes(codec.DIGEST_BYTES) + b"not what was meant")
    while (event := pipeline.next_event(60)) is None:
        pass
    assert "stage 1 of 3: DigestMismatchError" in event.reason


def test_open_requests_fail_when_the_engine_dies_and_none_is_left_hanging(
    tiny_model: Path,
) -> None:
    async def scenario() -> None:
        config = tiny_engine_config(
            tiny_model, pipeline_parallel_size=2, kernels="native", max_stage_restarts=0
        )
        engine = await AsyncEngine.start(config)
        try:
            streams = [engine.submit(request) for request in REQUESTS]
            await anext(streams[0])
            pipeline = engine._started.pipeline
            assert isinstance(pipeline, ProcessPipeline)
            os.kill(pipeline.pids[1], signal.SIGKILL)
            ends = await asyncio.wait_for(
                asyncio.gather(*(last(stream) for stream in streams), return_exceptions=True), 60
            )
            assert all(isinstance(end, EngineDeadError) for end in ends)
            assert engine.status is EngineStatus.DEAD
            with pytest.raises(EngineDeadError, match="signal 9"):
                engine.submit(REQUESTS[0])
        finally:
            await engine.shutdown()

    async def last(stream: object) -> RequestOutput:
        async for output in stream:  # type: ignore[attr-defined]
            final = output
        return final

    asyncio.run(scenario())


def test_status_tells_of_the_recovery_and_of_its_end(tiny_model: Path) -> None:
    async def scenario() -> None:
        config = tiny_engine_config(tiny_model, pipeline_parallel_size=2, kernels="native")
        engine = await AsyncEngine.start(config)
        try:
            seen = []
            set_status = engine._set_status

            def noting(status: EngineStatus, detail: str) -> None:
                seen.append(status)
                set_status(status, detail)

            engine._set_status = noting  # type: ignore[method-assign]
            stream = engine.submit(REQUESTS[0])
            await anext(stream)
            pipeline = engine._started.pipeline
            assert isinstance(pipeline, ProcessPipeline)
            os.kill(pipeline.pids[0], signal.SIGKILL)
            async for output in stream:
                final = output
            assert final.finish_reason is not None
            assert seen == [EngineStatus.RECOVERING, EngineStatus.READY]
            assert engine.status is EngineStatus.READY
        finally:
            await engine.shutdown()

    asyncio.run(scenario())


def test_stages_are_named_and_end_with_their_driver(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed without a chance to tidy up, the driver leaves no stage and no file behind."""
    temporary = tmp_path_factory.mktemp("t")
    program = (
        "import sys; from tokentight.engine.engine import Engine;"
        "from tokentight.engine.config import EngineConfig;"
        "engine = Engine(EngineConfig(model=sys.argv[1], pipeline_parallel_size=2,"
        " max_model_len=64, kv_cache_memory=2**21));"
        "print(*engine._parts.pipeline.pids, flush=True); sys.stdin.read()"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", program, str(tiny_model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)},
    )
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    names = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() for pid in pids]
    assert names == ["tokentight: stage 1 of 2", "tokentight: stage 2 of 2"]
    watched = [os.pidfd_open(pid) for pid in pids]
    driver.kill()
    driver.communicate()
    for descriptor in watched:
        ended, _, _ = select_readable(descriptor, 60)
        assert ended, "a stage outlived its driver"
        os.close(descriptor)
    assert not list(temporary.glob("tokentight-*"))


def select_readable(descriptor: int, timeout_s: float) -> tuple[list[int], list[int], list[int]]:
    import select

    return select.select([descriptor], [], [], timeout_s)
