"""However a step loop ends or is interrupted: nobody hangs, nothing stays behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_driver import LetterTokenizer, Load, Run, Sizes, alone, check_books
from hypothesis import given, settings
from hypothesis import strategies as st

from tokentight.engine.errors import EngineDeadError
from tokentight.engine.outputs import FinishReason, TokenLogprobs
from tokentight.engine.request import GenerationRequest, Request
from tokentight.pipeline.interface import PipelineEvent, PipelineFailed
from tokentight.pipeline.plan import NO_TOKEN, StepResult
from tokentight.sampling.params import SamplingParams

LOAD = Load((1, 2, 3), SamplingParams(max_tokens=3))


def test_a_loop_that_has_ended_says_so_instead_of_waiting_for_an_answer() -> None:
    run = Run(Sizes(), losing=lambda _: True, max_stage_restarts=0)
    run.add(LOAD)
    with pytest.raises(EngineDeadError, match="lost on purpose"):
        run.step()
    run.add(LOAD)
    with pytest.raises(EngineDeadError, match="lost on purpose"):
        run.step()


def test_a_failed_pipeline_ends_the_loop_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Sizes())
    run.add(LOAD)
    monkeypatch.setattr(run.pipeline, "next_event", lambda _: PipelineFailed("a stage raised"))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="a stage raised"):
            run.step()


def test_after_end_no_step_is_taken() -> None:
    run = Run(Sizes())
    run.add(LOAD)
    run.core.end("the engine was closed")
    with pytest.raises(EngineDeadError, match="closed"):
        run.step()
    assert not run.pipeline.plans


def test_an_interrupt_while_waiting_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Sizes(num_stages=2))
    number = run.add(LOAD)

    def interrupted(timeout_s: float | None) -> PipelineEvent:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run.pipeline, "next_event", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    while run.core.has_work:
        run.step()
    assert list(run.outputs[number].token_ids) == alone(LOAD)[0]


def test_an_interrupt_among_the_books_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-written books cannot be gone on with, so nobody may wait for more from them."""
    run = Run(Sizes())
    run.add(LOAD)

    def interrupted(self: Request, num_scheduled_tokens: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Request, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        run.step()


def test_a_request_that_cannot_be_set_up_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(Sizes())

    def broken(self: LetterTokenizer, token_id: int) -> bytes:
        raise KeyError(token_id)

    with monkeypatch.context() as patched:
        patched.setattr(LetterTokenizer, "token_bytes", broken)
        with pytest.raises(KeyError):
            run.add(LOAD)
    assert not run.core.has_work


def test_a_request_longer_than_the_context_is_a_bug_that_shows() -> None:
    run = Run(Sizes(max_model_len=32))
    asked = GenerationRequest("r", (1,), SamplingParams(max_tokens=40))
    with pytest.raises(AssertionError):
        run.core.add(asked, 41)


def test_a_recomputed_prompt_logprob_with_other_bits_ends_nothing() -> None:
    """Kernels that do not keep the promise may give it; the first one stands."""
    asked = GenerationRequest("r", (1, 2), SamplingParams(prompt_logprobs=0))
    request = Request(asked, 0, 0, 8)
    first = TokenLogprobs(2, -1.0, 1, ())
    request.record_prompt_logprob(1, first)
    request.record_prompt_logprob(1, replace(first, logprob=-1.0000001))
    assert request.prompt_logprobs == (None, first)


def test_a_reply_to_another_plan_is_refused_and_costs_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(Sizes())
    number = run.add(LOAD)
    execute = run.pipeline._execute
    with monkeypatch.context() as patched:
        patched.setattr(run.pipeline, "_execute", lambda plan, _: execute(plan, bytes(32)))
        run.step()
    assert run.core.stats().stage_restarts == 1
    while run.core.has_work:
        run.step()
    assert list(run.outputs[number].token_ids) == alone(LOAD)[0]


def test_a_request_aborted_in_flight_is_not_recomputed_after_a_loss() -> None:
    run = Run(Sizes(num_stages=2), losing=lambda event: event == 2)
    numbers = [run.add(LOAD), run.add(LOAD)]
    run.step()
    for number in numbers:
        run.core.abort(number)
    while run.core.has_work:
        run.step()
    assert all(plan.epoch == 0 for plan in run.pipeline.plans)


def test_tokens_are_counted_once() -> None:
    run = Run(Sizes())
    run.run([LOAD, Load((5, 6), SamplingParams(max_tokens=0))])
    assert run.core.stats().prompt_tokens == 5
    assert run.core.stats().generation_tokens == 3


def failing(result: StepResult, sampled: bool, scored: bool) -> StepResult:
    """The result of a model whose logits are not finite."""
    logprob = result.scored.logprob.copy()
    logprob[:] = np.nan if scored else logprob
    tokens = np.full_like(result.sampled_token_ids, NO_TOKEN)
    return replace(
        result,
        sampled_token_ids=tokens if sampled else result.sampled_token_ids,
        scored=replace(result.scored, logprob=logprob),
    )


@given(
    failures=st.dictionaries(
        st.integers(0, 30), st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=3
    ),
    aborts=st.dictionaries(st.integers(0, 30), st.integers(0, 5), max_size=4),
    num_stages=st.integers(1, 3),
)
@settings(deadline=None)
def test_requests_that_fail_or_are_aborted_leave_the_others_alone(
    failures: dict[int, tuple[bool, bool]], aborts: dict[int, int], num_stages: int
) -> None:
    """Not finite logits of any step, aborts at any time: an aborted request is told nothing more,
    a failed one has its error, and the rest have their whole answers."""
    run = Run(Sizes(num_stages=num_stages, num_blocks=20, max_num_batched_tokens=9))
    execute = run.pipeline._execute

    def sometimes_failing(plan, digest):  # type: ignore[no-untyped-def]
        result = execute(plan, digest)
        return failing(result, *failures.get(plan.step, (False, False)))

    run.pipeline._execute = sometimes_failing  # type: ignore[method-assign]
    loads = [
        Load((i, 5, 6, 7, 8, 9), SamplingParams(max_tokens=9, prompt_logprobs=i % 2 or None))
        for i in range(6)
    ]
    numbers = [run.add(load) for load in loads]
    told_at_abort: dict[int, object] = {}
    for step in range(1000):
        if step in aborts:
            number = numbers[aborts[step]]
            run.core.abort(number)
            told_at_abort.setdefault(number, run.outputs.get(number))
        if not run.core.has_work:
            break
        run.step()
    check_books(run.core)
    assert run.core.stats().kv_cache_usage == 0
    for load, number in zip(loads, numbers, strict=True):
        output = run.outputs.get(number)
        if number in told_at_abort:
            assert output is told_at_abort[number]
        elif output is not None and output.finish_reason is FinishReason.ERROR:
            assert "not finite" in (output.error or "")
            assert list(output.token_ids) == alone(load)[0][: len(output.token_ids)]
        else:
            assert output is not None
            assert list(output.token_ids) == alone(load)[0]
