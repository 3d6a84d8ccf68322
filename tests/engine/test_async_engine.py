"""The engine behind a service, over symbolic stages: every stream ends, whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
from engine_driver import LetterTokenizer, Load, Run, Sizes, alone
from symbolic_pipeline import VOCAB_SIZE

from tokentight.engine import async_engine as async_engine_module
from tokentight.engine.admission import Admission
from tokentight.engine.async_engine import AsyncEngine
from tokentight.engine.build import EngineParts
from tokentight.engine.config import EngineConfig
from tokentight.engine.core import EngineCore
from tokentight.engine.errors import EngineDeadError, EngineDrainingError, QueueFullError
from tokentight.engine.merge import merge
from tokentight.engine.outputs import FinishReason, RequestOutput
from tokentight.engine.request import GenerationRequest
from tokentight.engine.request_stream import RequestStream
from tokentight.engine.status import EngineInfo, EngineStatus
from tokentight.sampling.params import SamplingParams

CONFIG = EngineConfig(model="symbolic", max_num_seqs=4, max_queued_requests=4)
LOADS = [Load((i, 1, 2), SamplingParams(max_tokens=20)) for i in range(8)]


def parts_of(run: Run) -> EngineParts:
    return EngineParts(
        core=run.core,
        pipeline=run.pipeline,
        tokenizer=LetterTokenizer(),  # type: ignore[arg-type]
        admission=Admission(VOCAB_SIZE, run.sizes.max_model_len),
        info=EngineInfo("symbolic", 64, VOCAB_SIZE, 1, "symbolic", True, 64, 4),
    )


def request_of(load: Load) -> GenerationRequest:
    return GenerationRequest("r", load.prompt, load.params)


async def read(stream: RequestStream) -> RequestOutput:
    whole: RequestOutput | None = None
    async for output in stream:
        whole = merge(whole, output) if whole else output
    assert whole is not None
    return whole


def with_engine(
    monkeypatch: pytest.MonkeyPatch, run: Run, scenario: Callable[[AsyncEngine], Awaitable[None]]
) -> None:
    """Run a scenario; whatever it leaves open, shutting down must end."""
    monkeypatch.setattr(async_engine_module, "build_engine", lambda *_: parts_of(run))

    async def main() -> None:
        engine = await AsyncEngine.start(CONFIG)
        try:
            await scenario(engine)
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_streams_carry_the_answers_and_draining_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        streams = [engine.submit(request_of(load)) for load in LOADS]
        with pytest.raises(QueueFullError):
            engine.submit(request_of(LOADS[0]))
        draining = asyncio.create_task(engine.drain())
        outputs = await asyncio.gather(*(read(stream) for stream in streams))
        await draining
        assert [list(output.token_ids) for output in outputs] == [alone(load)[0] for load in LOADS]
        with pytest.raises(EngineDrainingError):
            engine.submit(request_of(LOADS[0]))

    with_engine(monkeypatch, Run(Sizes()), scenario)


def test_a_request_that_cannot_be_set_up_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def sometimes(core: EngineCore, asked: GenerationRequest, limit: int) -> int:
        if asked.prompt_token_ids[0] == 3:
            raise KeyError("not in the vocabulary")
        return add(core, asked, limit)

    add = EngineCore.add
    monkeypatch.setattr(EngineCore, "add", sometimes)

    async def scenario(engine: AsyncEngine) -> None:
        streams = [engine.submit(request_of(load)) for load in LOADS]
        outputs = await asyncio.gather(*(read(stream) for stream in streams))
        for load, output in zip(LOADS, outputs, strict=True):
            if load.prompt[0] == 3:
                assert output.finish_reason is FinishReason.ERROR
                assert "not in the vocabulary" in (output.error or "")
            else:
                assert list(output.token_ids) == alone(load)[0]

    with_engine(monkeypatch, Run(Sizes()), scenario)


def test_when_the_engine_dies_streams_fail_and_draining_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where somebody holds a stream that nobody reads."""
    run = Run(Sizes(), losing=lambda event: event > 5, max_stage_restarts=1)

    async def scenario(engine: AsyncEngine) -> None:
        streams = [engine.submit(request_of(load)) for load in LOADS]
        await engine.drain()
        assert engine.status is EngineStatus.DEAD
        for stream in streams[1:]:
            with pytest.raises(EngineDeadError, match="lost on purpose"):
                await read(stream)
        with pytest.raises(EngineDeadError, match="lost on purpose"):
            engine.submit(request_of(LOADS[0]))

    with_engine(monkeypatch, run, scenario)


def test_shutting_down_fails_open_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stream = engine.submit(request_of(Load((1,), SamplingParams(max_tokens=60))))
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await read(stream)

    with_engine(monkeypatch, Run(Sizes()), scenario)


def test_aborted_streams_free_their_blocks_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Sizes())

    async def scenario(engine: AsyncEngine) -> None:
        streams = [engine.submit(request_of(load)) for load in LOADS]
        await anext(streams[0])
        for stream in streams:
            stream.abort()
            stream.abort()
        assert [output async for output in streams[0]] == []
        await engine.drain()
        while engine.stats().num_requests_running + engine.stats().num_requests_waiting:
            await asyncio.sleep(0)
        assert engine.stats().kv_cache_usage == 0

    with_engine(monkeypatch, run, scenario)


def test_a_cancelled_start_closes_what_it_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Sizes())
    closed, may_finish = threading.Event(), threading.Event()
    monkeypatch.setattr(run.pipeline, "close", closed.set)

    def build(*_: object) -> EngineParts:
        may_finish.wait(30)
        return parts_of(run)

    monkeypatch.setattr(async_engine_module, "build_engine", build)

    async def main() -> None:
        starting = asyncio.create_task(AsyncEngine.start(CONFIG))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        may_finish.set()
        await asyncio.to_thread(closed.wait, 30)

    asyncio.run(main())
    assert closed.is_set()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "tokentight-engine"]
