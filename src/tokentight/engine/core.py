"""The step loop: schedule, plan, audit, send; then apply what comes back to the ledgers."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokentight.engine.auditor import audit
from tokentight.engine.batch import BatchRows
from tokentight.engine.block_pool import BlockPool
from tokentight.engine.detokenizer import DetokenizerTokenizer
from tokentight.engine.errors import EngineDeadError
from tokentight.engine.output_stream import Ending, OutputStream
from tokentight.engine.outputs import FinishReason, RequestOutput
from tokentight.engine.planner import build_plan
from tokentight.engine.request import GenerationRequest, Request, RequestState
from tokentight.engine.restarts import RestartBudget
from tokentight.engine.results import prompt_logprobs_of, token_logprobs
from tokentight.engine.scheduler import ScheduledRequest, Scheduler, SchedulerLimits
from tokentight.engine.status import EngineStats
from tokentight.pipeline.interface import (
    Pipeline,
    PipelineFailed,
    PipelineStartError,
    StageLost,
    Wakeup,
)
from tokentight.pipeline.plan import NO_TOKEN, Logprobs, StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """The sizes and limits of a step loop."""

    limits: SchedulerLimits
    num_blocks: int
    block_size: int
    max_model_len: int
    enable_prefix_caching: bool
    eos_token_ids: frozenset[int]
    max_stage_restarts: int
    stage_restart_window_s: float

    def __post_init__(self) -> None:
        # Or the oldest request, alone with all blocks, could still not go on.
        assert self.num_blocks * self.block_size >= self.max_model_len


@dataclass(frozen=True, slots=True)
class Update:
    """An output and the number of the request it belongs to."""

    request_number: int
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    digest: bytes
    scheduled: list[ScheduledRequest]


class EngineCore:
    """Owns every request from arrival to end. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        config: CoreConfig,
        pipeline: Pipeline,
        tokenizer: DetokenizerTokenizer,
        draw_seed: Callable[[], int],
        on_recovery: Callable[[str | None], None],
    ) -> None:
        """`on_recovery` is told what is being recovered from, and None when that is over."""
        self._config = config
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._draw_seed = draw_seed
        self._on_recovery = on_recovery
        self._pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self._rows = BatchRows(
            config.limits.max_num_seqs, -(-config.max_model_len // config.block_size)
        )
        self._scheduler = Scheduler(config.limits, self._pool, self._rows)
        self._requests: dict[int, Request] = {}
        self._streams: dict[int, OutputStream] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._next_number = 0
        self._next_step = 0
        self._epoch = 0
        self._restarts = RestartBudget(config.max_stage_restarts, config.stage_restart_window_s)
        self._ended: str | None = None
        self._waiting = False
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_violations = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            kv_cache_usage=self._pool.usage,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_generation_tokens,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            audit_violations=self._num_violations,
            stage_restarts=self._restarts.num_restarts,
        )

    def add(self, asked: GenerationRequest, max_num_tokens: int) -> int:
        """Queue an admitted request; returns its number."""
        assert max_num_tokens <= self._config.max_model_len
        seed = asked.params.seed if asked.params.seed is not None else self._draw_seed()
        request = Request(asked, self._next_number, seed, max_num_tokens)
        stream = OutputStream(request, self._tokenizer, self._config.eos_token_ids)
        self._next_number += 1
        self._requests[request.number] = request
        self._streams[request.number] = stream
        self._scheduler.add(request)
        return request.number

    def abort(self, request_number: int) -> None:
        """End a request without telling its caller more. Its blocks come free as soon as no step
        in flight writes to them. Aborting what has ended does nothing."""
        request = self._requests.get(request_number)
        if request is None:
            return
        if request.in_flight:
            request.abort_requested = True
        else:
            self._drop(request)

    def step(self, timeout_s: float | None = None) -> list[Update]:
        """Send the plans there is work for, wait for one event, and apply it.

        Waits only if something is in flight, `timeout_s` at most (None: until an event comes).

        Raises:
            EngineDeadError: the pipeline cannot go on, or `end` was called; no request will be
                answered any more.
        """
        if self._ended is not None:
            raise EngineDeadError(self._ended)
        try:
            return self._step(timeout_s)
        except BaseException as error:
            # Interrupted where it only waits, the loop can go on.
            if not (self._waiting and isinstance(error, KeyboardInterrupt)):
                self.end(str(error) if isinstance(error, EngineDeadError) else repr(error))
            raise

    def end(self, reason: str) -> None:
        """Answer nothing any more: every `step` from now on raises EngineDeadError."""
        if self._ended is None:
            self._ended = reason

    def _step(self, timeout_s: float | None) -> list[Update]:
        self._waiting = False
        updates = self._fill_pipeline()
        if not self._in_flight:
            return updates
        self._waiting = True
        event = self._pipeline.next_event(0 if updates else timeout_s)
        self._waiting = False
        match event:
            case StepResult() as result:
                updates.extend(self._apply(result))
            case StageLost() as lost:
                self._recover(lost.reason)
            case PipelineFailed(reason):
                raise EngineDeadError(reason)
            case Wakeup() | None:
                pass
        return updates

    def _fill_pipeline(self) -> list[Update]:
        updates: list[Update] = []
        while scheduled := self._scheduler.schedule():
            plan = build_plan(
                scheduled, self._rows, self._config.block_size, self._next_step, self._epoch
            )
            violations = audit(plan, scheduled, self._pool)
            if violations:
                self._scheduler.step_done(scheduled)
                for violation in violations:
                    self._num_violations += 1
                    request = self._requests[violation.request_number]
                    logger.error(
                        "audit: request %s stopped: %s",
                        request.asked.request_id,
                        violation.what,
                    )
                    updates.append(self._fail(request, f"audit: {violation.what}"))
                continue
            digest = self._pipeline.submit(plan)
            self._next_step += 1
            self._in_flight.append(_InFlight(plan, digest, scheduled))
        return updates

    def _apply(self, result: StepResult) -> list[Update]:
        expected = self._in_flight[0]
        if (result.step, result.digest) != (expected.plan.step, expected.digest):
            self._recover(f"the reply to step {result.step} belongs to another plan")
            return []
        self._in_flight.popleft()
        plan, scheduled = expected.plan, expected.scheduled
        self._scheduler.step_done(scheduled)
        for entry in scheduled:
            entry.request.advance(entry.num_scheduled_tokens)
            self._scheduler.computed(entry.request)
        updates = [
            self._fail(request, "the model's logits at a prompt token are not finite")
            for request in self._record_prompt_logprobs(plan, scheduled, result.scored)
            if not request.abort_requested
        ]
        sampled_rows = plan.rows_of(plan.sampling.token_indices)
        for index, row in enumerate(sampled_rows):
            request = scheduled[row].request
            if request.state is RequestState.RUNNING and not request.abort_requested:
                updates.append(self._append(request, result, index))
        for entry in scheduled:
            request = entry.request
            if request.state is RequestState.FINISHED:
                continue
            if request.abort_requested:
                self._drop(request)
            elif request.num_uncomputed_tokens == 0:  # nothing to sample: the prompt was all
                self._num_prompt_tokens += request.ledger.num_prompt_tokens
                ending = Ending(FinishReason.LENGTH)
                output = self._streams[request.number].end(ending)
                updates.append(Update(request.number, output))
                self._drop(request)
        return updates

    def _append(self, request: Request, result: StepResult, index: int) -> Update:
        token_id = int(result.sampled_token_ids[index])
        if token_id == NO_TOKEN:
            return self._fail(
                request,
                "no token can be sampled: the model's logits are not finite, or logit_bias bans "
                "every token",
            )
        if request.ledger.num_output_tokens == 0:
            self._num_prompt_tokens += request.ledger.num_prompt_tokens
        self._num_generation_tokens += 1
        request.ledger.append(token_id)
        num_logprobs = request.params.logprobs
        logprobs = (
            None
            if num_logprobs is None
            else token_logprobs(result.sampled, index, token_id, num_logprobs)
        )
        output, ending = self._streams[request.number].token(token_id, logprobs)
        if ending is not None:
            self._drop(request)
        return Update(request.number, output)

    def _record_prompt_logprobs(
        self, plan: StepPlan, scheduled: Sequence[ScheduledRequest], scored: Logprobs
    ) -> list[Request]:
        """Returns the requests of which a prompt token has no finite logprob."""
        failed: dict[int, Request] = {}
        for row, prompt_index, entry in prompt_logprobs_of(plan, scored):
            request = scheduled[row].request
            if math.isnan(entry.logprob):
                failed[request.number] = request
            else:
                request.record_prompt_logprob(prompt_index, entry)
        return list(failed.values())

    def _fail(self, request: Request, error: str) -> Update:
        output = self._streams[request.number].end(Ending(FinishReason.ERROR), error)
        self._drop(request)
        return Update(request.number, output)

    def _drop(self, request: Request) -> None:
        self._scheduler.finish(request)
        del self._requests[request.number]
        del self._streams[request.number]

    def _recover(self, reason: str) -> None:
        """Bring the pipeline back under a new epoch and recompute from the ledgers.

        Raises:
            EngineDeadError: more stages were lost than may be within the window.
        """
        logger.error("recovering: %s", reason)
        self._on_recovery(reason)
        self._in_flight.clear()
        self._scheduler.restart()
        for request in [r for r in self._requests.values() if r.abort_requested]:
            self._drop(request)
        while True:
            self._restarts.spend(reason)
            self._epoch += 1
            try:
                self._pipeline.recover(self._epoch)
                break
            except PipelineStartError as error:
                reason = str(error)
                logger.error("recovering: %s", reason)
        self._on_recovery(None)
