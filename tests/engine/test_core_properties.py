"""Bookkeeping under load: scheduler × preemption × prefix cache × chunking × stages × loss.

Every answer is compared with the one that the request's own tokens alone determine.
"""

from __future__ import annotations

import pytest
from engine_driver import Load, Run, Sizes, alone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from symbolic_pipeline import VOCAB_SIZE

from tokentight.engine.errors import EngineDeadError
from tokentight.engine.outputs import FinishReason
from tokentight.sampling.params import SamplingParams

MAX_MODEL_LEN = 64

# Few distinct tokens and stems, so that prefixes collide and the cache is hit.
prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=40),
    st.builds(
        lambda stem, tail: [stem] * 24 + tail,
        st.integers(0, 2),
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=16),
    ),
).map(tuple)

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 20),
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    logprobs=st.sampled_from([None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0, 1]),
)

loads = st.builds(
    Load,
    prompt=prompts,
    params=params,
    salt=st.sampled_from(["", "", "a"]),
    arrives=st.integers(0, 30),
    aborted=st.one_of(st.none(), st.none(), st.integers(0, 60)),
)

sizes = st.builds(
    Sizes,
    num_stages=st.integers(1, 3),
    num_blocks=st.sampled_from([16, 17, 20, 32, 128]),
    max_model_len=st.just(MAX_MODEL_LEN),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.sampled_from([1, 3, 7, 16, 64, 512]),
    enable_prefix_caching=st.booleans(),
)


def assert_as_if_alone(run: Run, loads: list[Load], numbers: dict[int, int]) -> None:
    for index, load in enumerate(loads):
        output = run.outputs.get(numbers[index])
        tokens, logprobs, prompt_logprobs = alone(load)
        if output is None or not output.finished:
            assert load.aborted is not None, f"request {index} never finished"
            if output is not None:
                assert list(output.token_ids) == tokens[: len(output.token_ids)]
            continue
        assert output.finish_reason is FinishReason.LENGTH, output.error
        assert list(output.token_ids) == tokens
        if load.params.logprobs is not None:
            assert output.logprobs is not None
            assert [entry.logprob for entry in output.logprobs] == logprobs
        if load.params.prompt_logprobs is not None:
            assert output.prompt_logprobs is not None
            first, *rest = output.prompt_logprobs
            assert first is None
            assert [entry.logprob for entry in rest if entry] == prompt_logprobs


@given(sizes=sizes, loads=st.lists(loads, min_size=1, max_size=12))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_answer_is_the_one_the_request_gets_alone(sizes: Sizes, loads: list[Load]) -> None:
    run = Run(sizes)
    numbers = run.run(loads)
    assert_as_if_alone(run, loads, numbers)
    assert run.core.stats().audit_violations == 0
    assert run.core.stats().kv_cache_usage == 0


@given(
    sizes=sizes,
    loads=st.lists(loads, min_size=1, max_size=8),
    lost=st.sets(st.integers(1, 80), min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_ledger_survives_lost_stages(sizes: Sizes, loads: list[Load], lost: set[int]) -> None:
    run = Run(sizes, losing=lost.__contains__)
    numbers = run.run(loads)
    assert_as_if_alone(run, loads, numbers)


def test_preemption_really_happens_in_a_small_pool() -> None:
    """The property above would be empty if the pool sizes it draws never made anyone yield."""
    loads = [Load(tuple([i] * 30), SamplingParams(max_tokens=20)) for i in range(6)]
    run = Run(Sizes(num_blocks=20, enable_prefix_caching=False))
    numbers = run.run(loads)
    assert run.core.stats().num_preemptions > 0
    assert_as_if_alone(run, loads, numbers)


def test_a_repeated_prompt_is_served_from_the_cache_and_not_under_another_salt() -> None:
    prompt = tuple(range(30))
    wanted = SamplingParams(max_tokens=4)
    run = Run(Sizes())
    run.run([Load(prompt, wanted)])
    assert run.core.stats().prefix_cache_hits == 0
    run.run([Load(prompt, wanted)])
    assert run.core.stats().prefix_cache_hits == 28
    run.run([Load(prompt, wanted, salt="other")])
    assert run.core.stats().prefix_cache_hits == 28


def test_a_lone_cached_request_leaves_one_token_to_compute() -> None:
    """A prompt of whole blocks, all cached, must still compute its last token: it is sampled."""
    prompt = tuple(range(32))
    run = Run(Sizes())
    loads = [Load(prompt, SamplingParams(max_tokens=3))]
    run.run(loads)
    numbers = run.run(loads)
    assert run.core.stats().prefix_cache_hits == 28
    assert_as_if_alone(run, loads, numbers)


def test_decodes_go_on_beside_a_long_prefill() -> None:
    """A prompt of many chunks must not make others wait for its end."""
    run = Run(Sizes(max_num_batched_tokens=8))
    short = run.add(Load((1, 2), SamplingParams(max_tokens=10)))
    long = run.add(Load(tuple([3] * 50), SamplingParams(max_tokens=1)))
    while long not in run.outputs:
        run.step()
    assert len(run.outputs[short].token_ids) >= 5


def test_stages_share_the_requests_evenly() -> None:
    """With two stages and eight decodes, plans of four are in flight, not eight and none."""
    run = Run(Sizes(num_stages=2, max_num_batched_tokens=64))
    for token_id in range(8):
        run.add(Load((token_id, 1), SamplingParams(max_tokens=30)))
    for _ in range(20):
        run.step()
    assert [plan.num_rows for plan in run.pipeline.plans[-4:]] == [4, 4, 4, 4]


def test_stages_share_the_requests_evenly_while_others_wait_for_blocks() -> None:
    """Requests that no block is free for take no part in the division: else one plan would hold
    everybody and the stages would take turns."""
    run = Run(Sizes(num_stages=2, num_blocks=128, max_num_seqs=32, max_num_batched_tokens=2048))
    for token_id in range(40):
        run.add(Load(tuple([token_id] * 44), SamplingParams(max_tokens=20)))
    for _ in range(20):
        run.step()
    assert run.core.stats().num_requests_waiting > 20
    assert {plan.num_rows for plan in run.pipeline.plans} <= {4, 5, 6}


def test_a_prompt_of_many_chunks_keeps_the_blocks_of_those_to_come() -> None:
    """Room was found for all of it when it was admitted; a newcomer must not be given that room
    and then lose it again."""
    run = Run(Sizes(num_stages=2, num_blocks=16, max_num_batched_tokens=8))
    run.add(Load(tuple([1] * 50), SamplingParams(max_tokens=1)))
    run.add(Load(tuple([2] * 50), SamplingParams(max_tokens=1)))
    while run.core.has_work:
        run.step()
    assert run.core.stats().num_preemptions == 0


def test_an_engine_that_keeps_losing_stages_gives_up_and_says_why() -> None:
    run = Run(Sizes(), losing=lambda _: True, max_stage_restarts=3)
    run.add(Load((1, 2, 3), SamplingParams(max_tokens=3)))
    with pytest.raises(EngineDeadError, match=r"lost 4 times .* lost on purpose"):
        run.run([Load((1, 2), SamplingParams(max_tokens=1))])
