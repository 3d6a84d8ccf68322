"""The process of one stage: `python -m tokentight.pipeline.stage_process`.

It reads its start order from standard input and ends when that closes, so a stage never outlives
its driver. Between plans it remembers one number: the highest epoch it has seen.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import zmq
from torch import Tensor

from tokentight.pipeline import codec, transport
from tokentight.pipeline.plan import StepPlan
from tokentight.pipeline.spec import LoadedStage, StageSpec, load_stage
from tokentight.pipeline.stage import Stage

logger = logging.getLogger(__name__)


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage process is told at start, as one JSON line."""

    spec: StageSpec
    endpoints_directory: str
    epoch: int


class StaleEpochError(ValueError):
    """A plan of an epoch that is over."""


def check(plan: StepPlan, digest: bytes, header: transport.HiddenHeader | None, epoch: int) -> None:
    """Refuse what must not be executed.

    Raises:
        StaleEpochError: the plan belongs to an epoch that is over; it is dropped.
        DigestMismatchError: the hidden states belong to another plan.
    """
    if plan.epoch < epoch:
        raise StaleEpochError(f"step {plan.step} is of epoch {plan.epoch}, now is {epoch}")
    if header is None:
        return
    if (header.step, header.epoch, header.digest) != (plan.step, plan.epoch, digest):
        raise codec.DigestMismatchError(
            f"hidden states of step {header.step} came with the plan of step {plan.step}"
        )
    if header.shape[0] != plan.num_scheduled_tokens:
        raise codec.DigestMismatchError(
            f"{header.shape[0]} hidden states came with {plan.num_scheduled_tokens} tokens"
        )


class StageProcess:
    """Receives plans, executes them, passes them on; the last stage answers the driver."""

    def __init__(
        self,
        spec: StageSpec,
        epoch: int,
        stage: Stage,
        upstream: zmq.Socket[bytes],
        downstream: zmq.Socket[bytes] | None,
        driver: zmq.Socket[bytes],
    ) -> None:
        self._spec = spec
        self._epoch = epoch
        self._stage = stage
        self._upstream = upstream
        self._downstream = downstream
        self._driver = driver

    def run(self) -> None:
        """Work until standard input closes."""
        poller = zmq.Poller()
        poller.register(self._upstream, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if sys.stdin.fileno() in ready:
                return
            self._step()

    def _step(self) -> None:
        encoded, header, hidden = transport.receive(self._upstream)
        plan = codec.decode_plan(encoded)
        try:
            check(plan, codec.digest_of(encoded), header, self._epoch)
        except StaleEpochError as error:
            logger.info("stage %d refused a late plan: %s", self._spec.stage_index, error)
            return
        self._epoch = plan.epoch
        self._pass_on(plan, encoded, self._stage.execute(plan, hidden))

    def _pass_on(self, plan: StepPlan, encoded: bytes, hidden: Tensor) -> None:
        if self._downstream is not None:
            transport.send_hidden(self._downstream, encoded, plan.step, plan.epoch, hidden)
            return
        result = self._stage.answer(plan, hidden, codec.digest_of(encoded))
        transport.to_driver(self._driver, transport.Result(codec.encode(result)))


def _load(spec: StageSpec, driver: zmq.Socket[bytes]) -> LoadedStage:
    def progress(done: int, total: int) -> None:
        transport.to_driver(driver, transport.Loading(spec.stage_index, done, total))

    return load_stage(spec, progress)


def main() -> int:
    """Run one stage; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartOrder)
    spec = order.spec
    _name_process(f"tokentight: stage {spec.stage_index + 1} of {spec.num_stages}")
    # What every stage would say of this machine is said once, by the first.
    level = logging.WARNING if spec.stage_index == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")
    if spec.cpus is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec.cpus)

    endpoints = transport.Endpoints(Path(order.endpoints_directory))
    context = zmq.Context()
    driver = context.socket(zmq.PUSH)
    driver.connect(endpoints.driver)
    is_last = spec.stage_index == spec.num_stages - 1
    running = False
    try:
        loaded = _load(spec, driver)
        upstream = context.socket(zmq.PULL)
        upstream.bind(endpoints.stage(spec.stage_index))
        downstream = None
        if not is_last:
            downstream = context.socket(zmq.PUSH)
            downstream.connect(endpoints.stage(spec.stage_index + 1))
        hello = transport.Hello(
            spec.stage_index, os.getpid(), loaded.kernels_name, loaded.promise_holds
        )
        transport.to_driver(driver, hello)
        running = True
        StageProcess(spec, order.epoch, loaded.stage, upstream, downstream, driver).run()
    except Exception as error:  # the driver must hear why this stage ends
        # Why a stage cannot start is told by the driver; what fails later needs its traceback.
        if running:
            logger.exception("stage %d of %d failed", spec.stage_index + 1, spec.num_stages)
        reason = f"{type(error).__name__}: {error}"
        transport.to_driver(driver, transport.Failure(spec.stage_index, os.getpid(), reason))
        context.destroy(linger=1000)
        return 1
    context.destroy(linger=0)
    endpoints.remove()  # the driver is gone, perhaps without a chance to tidy up
    return 0


def _name_process(title: str) -> None:
    from setproctitle import setproctitle

    setproctitle(title)


if __name__ == "__main__":
    sys.exit(main())
