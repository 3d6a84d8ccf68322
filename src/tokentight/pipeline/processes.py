"""Stages as processes on this machine, watched, and restarted when one is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

import tokentight
from tokentight.pipeline import codec, transport
from tokentight.pipeline.interface import (
    PipelineEvent,
    PipelineFailed,
    PipelineStartError,
    StageLost,
    Wakeup,
)
from tokentight.pipeline.plan import StepPlan
from tokentight.pipeline.spec import StageSpec
from tokentight.pipeline.stage_process import StartOrder

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""How long a stage that is loading may say nothing before the start counts as failed."""

STALL_TIMEOUT_S = 600.0
"""How long stages may owe an answer. A step takes far less; a stage that is stopped, or waits
forever, is found by this alone."""

END_TIMEOUT_S = 5.0
"""How long stages have to end when told to, before they are killed."""

LoadingProgress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class _Exited:
    stage_index: int
    pid: int
    code: int


_Incoming = transport.ToDriver | PipelineFailed | _Exited | Wakeup


class ProcessPipeline:
    """One process for each stage, and a thread that receives what they say.

    `progress(stage_index, done, total)` is called while weights load.
    """

    def __init__(self, specs: Sequence[StageSpec], progress: LoadingProgress | None = None) -> None:
        self.num_stages = len(specs)
        self.kernels_name = ""
        self.promise_holds = True
        self._specs = specs
        self._progress = progress
        self._epoch = 0
        self._incoming: queue.SimpleQueue[_Incoming] = queue.SimpleQueue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []
        self._ready: set[int] = set()  # pids of stages that wait for plans
        self._last_sign = time.monotonic()  # when something was sent or answered
        self._given_up = threading.Event()
        self._failures: dict[int, str] = {}  # by pid: why it said it would end
        self._endpoints = transport.Endpoints.create()
        self._context = zmq.Context()
        inbox = self._context.socket(zmq.PULL)
        inbox.bind(self._endpoints.driver)
        self._receiver = threading.Thread(
            target=self._receive, args=(inbox,), name="tokentight-receiver", daemon=True
        )
        self._receiver.start()
        self._first_stage = self._context.socket(zmq.PUSH)
        self._first_stage.connect(self._endpoints.stage(0))
        self._closed = False
        try:
            self._start_missing()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The stages' process ids, first stage first."""
        return tuple(self._processes[index].pid for index in range(self.num_stages))

    def submit(self, plan: StepPlan) -> bytes:
        assert plan.epoch == self._epoch, "a plan of an epoch that is over"
        encoded = codec.encode(plan)
        transport.send_plan(self._first_stage, encoded)
        self._last_sign = time.monotonic()
        return codec.digest_of(encoded)

    def next_event(self, timeout_s: float | None) -> PipelineEvent | None:
        while True:
            left = max(0.0, self._last_sign + STALL_TIMEOUT_S - time.monotonic())
            try:
                message = self._incoming.get(timeout=left if timeout_s is None else timeout_s)
            except queue.Empty:
                return self._stalled() if timeout_s is None else None
            match message:
                case Wakeup() | PipelineFailed():
                    return message
                case transport.Result(encoded):
                    result = codec.decode_result(encoded)
                    if result.epoch == self._epoch:
                        self._last_sign = time.monotonic()
                        return result
                    logger.info("refused a reply of epoch %d, now is %d", result.epoch, self._epoch)
                case _:
                    lost = self._lost(message)
                    if lost is not None:
                        return lost

    def wake(self) -> None:
        self._incoming.put(Wakeup())

    def recover(self, epoch: int) -> None:
        assert epoch > self._epoch
        self._epoch = epoch
        self._start_missing()

    def give_up_recovery(self) -> None:
        self._given_up.set()
        self.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _end(self._processes.values())
        for watcher in self._watchers:
            watcher.join()
        closing = self._context.socket(zmq.PUSH)
        closing.connect(self._endpoints.driver)
        transport.to_driver(closing, transport.Closing())
        self._receiver.join()
        self._context.destroy(linger=0)
        self._endpoints.remove()

    def _receive(self, inbox: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message = transport.from_stage(inbox)
            except msgspec.MsgspecError as error:
                self._incoming.put(PipelineFailed(f"a message that is none arrived: {error}"))
                continue
            if isinstance(message, transport.Closing):
                inbox.close()
                return
            self._incoming.put(message)

    def _lost(self, message: _Incoming) -> StageLost | None:
        """What a message that is neither a result nor a wake-up means for the pipeline."""
        match message:
            case transport.Failure(_, pid, reason):
                self._failures[pid] = reason
            case transport.Loading(index, done, total):
                if self._progress is not None:
                    self._progress(index, done, total)
            case _Exited(index, pid, code) if self._processes[index].pid == pid:
                self._ready.discard(pid)
                why = self._failures.pop(pid, "") or _exit_reason(code)
                return StageLost(index, f"stage {index + 1} of {self.num_stages}: {why}")
        return None

    def _stalled(self) -> StageLost:
        """Nothing tells which stage it is, so all of them are ended; `recover` starts them."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        return StageLost(0, f"no stage answered for {STALL_TIMEOUT_S:.0f} s")

    def _start_missing(self) -> None:
        """Start every stage that is not running and wait until all of them are ready."""
        for spec in self._specs:
            process = self._processes.get(spec.stage_index)
            if process is None or process.poll() is not None:
                self._start(spec)
        while missing := [p for p in self._processes.values() if p.pid not in self._ready]:
            if self._given_up.is_set():
                raise PipelineStartError("the engine is shutting down")
            try:
                message = self._incoming.get(timeout=START_TIMEOUT_S)
            except queue.Empty:
                for process in missing:
                    process.kill()
                    process.wait()
                raise PipelineStartError(
                    f"a stage that is loading has said nothing for {START_TIMEOUT_S:.0f} s"
                ) from None
            match message:
                case transport.Hello(_, pid, kernels_name, promise_holds):
                    self._ready.add(pid)
                    self.kernels_name = kernels_name
                    self.promise_holds = self.promise_holds and promise_holds
                case transport.Result():
                    logger.info("refused a reply of the epoch that is over")
                case _:
                    lost = self._lost(message)
                    if lost is not None:
                        raise PipelineStartError(lost.reason)

    def _start(self, spec: StageSpec) -> None:
        order = StartOrder(
            spec=spec,
            endpoints_directory=str(self._endpoints.directory),
            epoch=self._epoch,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "tokentight.pipeline.stage_process"],
            stdin=subprocess.PIPE,
            bufsize=0,  # nothing is left to be flushed into a pipe that broke
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
        assert process.stdin is not None
        # A stage that dies before it reads its order is heard of by its exit.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._processes[spec.stage_index] = process
        watcher = threading.Thread(
            target=self._wait_for_exit, args=(spec.stage_index, process), daemon=True
        )
        watcher.start()
        self._watchers.append(watcher)

    def _wait_for_exit(self, stage_index: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        self._incoming.put(_Exited(stage_index, process.pid, code))


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + END_TIMEOUT_S
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """This process's environment, with this very package first on the path."""
    root = str(Path(tokentight.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    return {
        "OMP_WAIT_POLICY": "passive",  # torch's idle threads must not spin against other stages
        **os.environ,
        "PYTHONPATH": root if not known else os.pathsep.join([root, known]),
    }


def _exit_reason(code: int) -> str:
    if code < 0:
        return f"its process was killed by signal {-code}"
    return f"its process ended with exit code {code}"


def _has_fileno(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True
