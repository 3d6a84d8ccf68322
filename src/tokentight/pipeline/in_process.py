"""Stages in this process, on a thread of their own. Kernels release the GIL, so the driver's
bookkeeping goes on beside them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from torch import Tensor

from tokentight.pipeline import codec
from tokentight.pipeline.interface import PipelineEvent, PipelineFailed, PipelineStartError, Wakeup
from tokentight.pipeline.plan import StepPlan, StepResult
from tokentight.pipeline.spec import LoadedStage


class InProcessPipeline:
    """Runs its stages one after another on one worker thread."""

    def __init__(self, stages: Sequence[LoadedStage]) -> None:
        self._stages = [loaded.stage for loaded in stages]
        self.num_stages = len(stages)
        self.kernels_name = stages[0].kernels_name
        self.promise_holds = all(loaded.promise_holds for loaded in stages)
        self._plans: queue.SimpleQueue[tuple[StepPlan, bytes] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[PipelineEvent] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tokentight-stage", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> bytes:
        digest = codec.digest_of(codec.encode(plan))
        self._plans.put((plan, digest))
        return digest

    def next_event(self, timeout_s: float | None) -> PipelineEvent | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        self._events.put(Wakeup())

    def recover(self, epoch: int) -> None:
        raise PipelineStartError(
            f"epoch {epoch}: a stage inside the engine's own process cannot be restarted; "
            "restart the engine"
        )

    def give_up_recovery(self) -> None:
        """Nothing recovers here."""

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (order := self._plans.get()) is not None:
            plan, digest = order
            try:
                self._events.put(self._execute(plan, digest))
            except Exception as error:  # the driver must hear of it, whatever it is
                self._events.put(PipelineFailed(f"step {plan.step}: {error!r}"))

    def _execute(self, plan: StepPlan, digest: bytes) -> StepResult:
        hidden: Tensor | None = None
        for stage in self._stages:
            hidden = stage.execute(plan, hidden)
        assert hidden is not None
        return self._stages[-1].answer(plan, hidden, digest)
