"""Interrupted, closed, hung, failing to start: an engine ends clean or goes on, and never hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from bitwise import answer_bits
from tiny_served_model import tiny_engine_config

from tokentight.engine.async_engine import AsyncEngine
from tokentight.engine.engine import Engine
from tokentight.engine.errors import EngineDeadError
from tokentight.engine.request import GenerationRequest
from tokentight.engine.status import EngineStatus
from tokentight.pipeline import processes
from tokentight.pipeline.interface import PipelineStartError
from tokentight.pipeline.processes import ProcessPipeline
from tokentight.pipeline.stage import Stage
from tokentight.sampling.params import SamplingParams

pytestmark = pytest.mark.integration

PROMPTS = [(*range(20 + index), index) for index in range(4)]
WANTED = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)


class CallbackError(Exception):
    """Raised by a caller's own callback."""


def bits(engine: Engine) -> list[tuple[object, ...]]:
    return [answer_bits(completion) for completion in engine.generate(PROMPTS, WANTED)]


def test_an_engine_interrupted_in_the_middle_answers_as_before(tiny_model: Path) -> None:
    with Engine(tiny_engine_config(tiny_model)) as engine:
        before = bits(engine)

        def interrupt(_: int) -> None:
            raise CallbackError

        uneven = [SamplingParams(max_tokens=2 + 9 * index) for index in range(4)]
        with pytest.raises(CallbackError):
            engine.generate(PROMPTS, uneven, on_finished=interrupt)
        assert bits(engine) == before
        assert engine.stats().kv_cache_usage == 0
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate(PROMPTS, WANTED)


def test_a_stage_that_raises_ends_the_engine_at_once_and_for_good(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    with Engine(tiny_engine_config(tiny_model)) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Stage, "execute", broken)
            with pytest.raises(EngineDeadError, match="a kernel failed"):
                engine.generate(PROMPTS, WANTED)
        with pytest.raises(EngineDeadError, match="a kernel failed"):
            engine.generate(PROMPTS, WANTED)


def belongings() -> tuple[int, set[str], set[str]]:
    """Open descriptors, threads and temporary directories of this process."""
    directories = {path.name for path in Path(tempfile.gettempdir()).glob("tokentight-*")}
    threads = {thread.name for thread in threading.enumerate()}
    return len(os.listdir("/proc/self/fd")), threads, directories


def run_and_lose(directory: Path, stages: tuple[int, ...]) -> None:
    with Engine(tiny_engine_config(directory, pipeline_parallel_size=2)) as engine:
        before = bits(engine)
        pipeline = engine._parts.pipeline
        assert isinstance(pipeline, ProcessPipeline)
        pids = pipeline.pids
        for stage in stages:
            os.kill(pids[stage], signal.SIGKILL)
        assert bits(engine) == before
    for index in range(2):
        assert pipeline._processes[index].returncode is not None


def test_starts_losses_and_ends_leave_nothing_behind(tiny_model: Path) -> None:
    run_and_lose(tiny_model, (0,))
    before = belongings()
    run_and_lose(tiny_model, (0, 1))
    assert belongings() == before


def stages_run(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    """Stages started from now on run a shell script instead."""
    program = directory / "stage.sh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("exec sleep 1000", "said nothing for 1 s"),
        ("exec 0<&-; exit 3", "exit code 3"),
        ("kill -KILL $$", "signal 9"),
    ],
)
def test_stages_that_do_not_start_are_named_and_leave_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, what: str
) -> None:
    monkeypatch.setattr(processes, "START_TIMEOUT_S", 1)
    before = belongings()
    with monkeypatch.context() as patched:
        stages_run(patched, tmp_path, script)
        with pytest.raises(PipelineStartError, match=what):
            Engine(tiny_engine_config(tiny_model, pipeline_parallel_size=2))
    assert belongings() == before


def test_a_hung_stage_is_found_and_shutting_down_does_not_wait_for_a_recovery(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STALL_TIMEOUT_S", 3)

    async def tokens_of(engine: AsyncEngine, then: Callable[[], None]) -> tuple[int, ...]:
        stream = engine.submit(GenerationRequest("r", PROMPTS[0], WANTED))
        tokens: tuple[int, ...] = ()
        async for output in stream:
            if not tokens:
                then()
            tokens += output.token_ids
        return tokens

    async def scenario() -> None:
        engine = await AsyncEngine.start(tiny_engine_config(tiny_model, pipeline_parallel_size=2))
        pipeline = engine._started.pipeline
        assert isinstance(pipeline, ProcessPipeline)
        quiet = await tokens_of(engine, lambda: None)

        def second_stage(number: signal.Signals) -> None:
            os.kill(pipeline.pids[1], number)

        stop = partial(second_stage, signal.SIGSTOP)
        assert await asyncio.wait_for(tokens_of(engine, stop), 60) == quiet
        assert engine.stats().stage_restarts == 1
        stages_run(monkeypatch, tmp_path, "exec sleep 1000")
        kill = partial(second_stage, signal.SIGKILL)
        reading = asyncio.create_task(tokens_of(engine, kill))
        while engine.status is not EngineStatus.RECOVERING:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.shutdown(), 30)
        with pytest.raises(EngineDeadError):
            await reading

    asyncio.run(scenario())
