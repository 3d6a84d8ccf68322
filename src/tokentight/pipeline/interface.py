"""How the driver sees a pipeline, wherever its stages run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tokentight.pipeline.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StageLost:
    """A stage is gone and with it its KV. `recover` may bring it back."""

    stage_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class PipelineFailed:
    """The pipeline cannot go on: what it does again would fail again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wakeup:
    """Somebody called `wake`."""


PipelineEvent = StepResult | StageLost | PipelineFailed | Wakeup


class PipelineStartError(RuntimeError):
    """A stage could not be started; the message says why and what to do."""


class Pipeline(Protocol):
    """Stages one after another. Plans are answered in the order they were submitted."""

    @property
    def num_stages(self) -> int: ...

    @property
    def kernels_name(self) -> str: ...

    @property
    def promise_holds(self) -> bool:
        """Whether the kernels were found row-invariant on this machine."""
        ...

    def submit(self, plan: StepPlan) -> bytes:
        """Send a plan to the first stage and return its digest at once; the answer carries it."""
        ...

    def next_event(self, timeout_s: float | None) -> PipelineEvent | None:
        """The next event, or None when none came within `timeout_s` (None: wait for one)."""
        ...

    def wake(self) -> None:
        """Make `next_event` return `Wakeup`. Callable from any thread."""
        ...

    def recover(self, epoch: int) -> None:
        """Bring lost stages back under a new epoch; replies of older ones are refused from now on.

        Raises:
            PipelineStartError: a stage did not come back.
        """
        ...

    def give_up_recovery(self) -> None:
        """Make a `recover` that is under way, or comes, fail at once: the engine is to end.
        Callable from any thread."""
        ...

    def close(self) -> None:
        """End every stage. Idempotent."""
        ...
