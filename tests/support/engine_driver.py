"""Drives an `EngineCore` over the symbolic pipeline, checking its books at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from symbolic_pipeline import START, SymbolicPipeline, link, logprob_of, token_of

from tokentight.engine.core import CoreConfig, EngineCore
from tokentight.engine.merge import merge
from tokentight.engine.outputs import RequestOutput
from tokentight.engine.request import GenerationRequest
from tokentight.engine.scheduler import SchedulerLimits
from tokentight.sampling.params import SamplingParams


class LetterTokenizer:
    """Token id i is the character U+0100 + i."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(0x100 + token_id) for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(0x100 + token_id).encode()

    def is_special(self, token_id: int) -> bool:
        return False

    def is_byte_token(self, token_id: int) -> bool:
        return False


@dataclass(frozen=True)
class Load:
    """One request, the step before which it arrives and the one before which it is aborted."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str = ""
    arrives: int = 0
    aborted: int | None = None


@dataclass(frozen=True)
class Sizes:
    num_stages: int = 1
    num_blocks: int = 64
    block_size: int = 4
    max_model_len: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    enable_prefix_caching: bool = True


@dataclass
class Run:
    """A core over symbolic stages and what it has answered so far."""

    sizes: Sizes
    losing: Callable[[int], bool] = lambda _: False
    max_stage_restarts: int = 1000
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.pipeline = SymbolicPipeline(
            sizes.num_stages, sizes.num_blocks, sizes.block_size, self.losing
        )
        self.core = EngineCore(
            CoreConfig(
                limits=SchedulerLimits(
                    sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.num_stages
                ),
                num_blocks=sizes.num_blocks,
                block_size=sizes.block_size,
                max_model_len=sizes.max_model_len,
                enable_prefix_caching=sizes.enable_prefix_caching,
                eos_token_ids=frozenset(),
                max_stage_restarts=self.max_stage_restarts,
                stage_restart_window_s=3600,
            ),
            self.pipeline,
            LetterTokenizer(),
            lambda: 12345,
            lambda _: None,
        )

    def add(self, load: Load) -> int:
        asked = GenerationRequest(
            request_id="r", prompt_token_ids=load.prompt, params=load.params, cache_salt=load.salt
        )
        limit = self.sizes.max_model_len
        if load.params.max_tokens is not None:
            limit = min(limit, len(load.prompt) + load.params.max_tokens)
        return self.core.add(asked, limit)

    def step(self) -> None:
        for update in self.core.step():
            known = self.outputs.get(update.request_number)
            assert known is None or not known.finished, "an output after the last one"
            output = merge(known, update.output) if known else update.output
            self.outputs[update.request_number] = output
        check_books(self.core)

    def run(self, loads: list[Load], max_steps: int = 20_000) -> dict[int, int]:
        """Run all loads to their end; returns each load's request number."""
        numbers: dict[int, int] = {}
        for step in range(max_steps):
            for index, load in enumerate(loads):
                if load.arrives == step:
                    numbers[index] = self.add(load)
                if load.aborted == step and index in numbers:
                    self.core.abort(numbers[index])
            if not self.core.has_work and step > max(load.arrives for load in loads):
                return numbers
            self.step()
        raise AssertionError(f"requests are still open after {max_steps} steps")


def alone(load: Load) -> tuple[list[int], list[float], list[float]]:
    """What the request's answer must be, computed from its own tokens and nothing else:
    output tokens, their logprobs, and the prompt tokens' logprobs from the second on."""
    state = START
    prompt_logprobs = []
    for position, token_id in enumerate(load.prompt):
        if position:
            prompt_logprobs.append(logprob_of(state, token_id))
        state = link(state, token_id, position)
    seed = 12345 if load.params.seed is None else load.params.seed
    tokens, logprobs = [], []
    assert load.params.max_tokens is not None
    for position in range(len(load.prompt), len(load.prompt) + load.params.max_tokens):
        token_id = token_of(state, seed, 0)
        tokens.append(token_id)
        logprobs.append(logprob_of(state, token_id))
        state = link(state, token_id, position)
    return tokens, logprobs, prompt_logprobs


def check_books(core: EngineCore) -> None:
    """Every block is free or referenced, never both, and referenced as often as it is held."""
    pool, scheduler = core._pool, core._scheduler
    held = Counter(block for request in scheduler.requests() for block in request.block_ids)
    for block_id in range(pool.num_blocks):
        assert pool.ref_count(block_id) == held[block_id]
        assert pool.is_free(block_id) == (held[block_id] == 0)
    assert scheduler.num_running <= scheduler.limits.max_num_seqs
    assert scheduler.num_plans_in_flight <= scheduler.limits.max_plans_in_flight
    for plan in core._in_flight:
        assert plan.plan.num_scheduled_tokens <= scheduler.limits.max_num_batched_tokens
    in_flight = Counter(
        entry.request.number for plan in core._in_flight for entry in plan.scheduled
    )
    assert all(count == 1 for count in in_flight.values()), "a request is in two plans"
