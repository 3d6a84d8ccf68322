"""Stages as processes on this machine, watched, and restarted when one is lost."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

import tokentight
from tokentight.pipeline import codec, transport
from tokentight.pipeline.interface import (
    PipelineEvent,
    PipelineStartError,
    StageLost,
    Wakeup,
)
from tokentight.pipeline.plan import StepPlan
from tokentight.pipeline.spec import StageSpec
from tokentight.pipeline.stage_process import StartOrder

START_TIMEOUT_S = 600.0
"""How long a stage may take to load before the start counts as failed."""

LoadingProgress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class _Exited:
    stage_index: int
    pid: int
    code: int


_Incoming = transport.ToDriver | _Exited | Wakeup


class ProcessPipeline:
    """One process for each stage, and a thread that receives what they say.

    `progress(stage_index, done, total)` is called while weights load.
    """

    def __init__(self, specs: Sequence[StageSpec], progress: LoadingProgress | None = None) -> None:
        self.num_stages = len(specs)
        self.kernels_name = ""
        self.promise_holds = True
        self.num_refused_replies = 0
        self._specs = specs
        self._progress = progress
        self._epoch = 0
        self._incoming: queue.SimpleQueue[_Incoming] = queue.SimpleQueue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
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
        return codec.digest_of(encoded)

    def next_event(self, timeout_s: float | None) -> PipelineEvent | None:
        while True:
            try:
                message = self._incoming.get(timeout=timeout_s)
            except queue.Empty:
                return None
            match message:
                case Wakeup():
                    return message
                case transport.Result(encoded):
                    result = codec.decode_result(encoded)
                    if result.epoch == self._epoch:
                        return result
                    self.num_refused_replies += 1
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

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for process in self._processes.values():
            _end(process)
        closing = self._context.socket(zmq.PUSH)
        closing.connect(self._endpoints.driver)
        transport.to_driver(closing, transport.Closing())
        self._receiver.join()
        self._context.destroy(linger=0)
        self._endpoints.remove()

    def _receive(self, inbox: zmq.Socket[bytes]) -> None:
        while True:
            message = transport.from_stage(inbox)
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
                why = self._failures.pop(pid, "") or _exit_reason(code)
                return StageLost(index, f"stage {index + 1} of {self.num_stages}: {why}")
        return None

    def _start_missing(self) -> None:
        """Start every stage that is not running and wait until all of them are ready."""
        awaited = set()
        for spec in self._specs:
            process = self._processes.get(spec.stage_index)
            if process is None or process.poll() is not None:
                awaited.add(self._start(spec))
        while awaited:
            try:
                message = self._incoming.get(timeout=START_TIMEOUT_S)
            except queue.Empty:
                raise PipelineStartError(
                    f"a stage did not start within {START_TIMEOUT_S:.0f} s"
                ) from None
            match message:
                case transport.Hello(_, pid, kernels_name, promise_holds):
                    awaited.discard(pid)
                    self.kernels_name = kernels_name
                    self.promise_holds = self.promise_holds and promise_holds
                case transport.Result():
                    self.num_refused_replies += 1
                case _:
                    lost = self._lost(message)
                    if lost is not None:
                        raise PipelineStartError(lost.reason)

    def _start(self, spec: StageSpec) -> int:
        order = StartOrder(
            spec=spec,
            endpoints_directory=str(self._endpoints.directory),
            epoch=self._epoch,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "tokentight.pipeline.stage_process"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
        assert process.stdin is not None
        # A stage that dies before it reads its order is heard of by its exit.
        try:
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        self._processes[spec.stage_index] = process
        threading.Thread(
            target=self._wait_for_exit, args=(spec.stage_index, process), daemon=True
        ).start()
        return process.pid

    def _wait_for_exit(self, stage_index: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._incoming.put(_Exited(stage_index, process.pid, code))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


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
