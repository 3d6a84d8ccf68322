"""How plans, hidden states and results travel between processes: ZeroMQ over local sockets.

Every process pulls from one socket it binds and pushes to the next one's; a restarted stage binds
the same address and its neighbours reconnect. The addresses lie in a directory only this user can
enter.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor

from tokentight.pipeline import codec


class HiddenHeader(msgspec.Struct, frozen=True, array_like=True):
    """Names the plan that hidden states belong to."""

    step: int
    epoch: int
    digest: bytes
    shape: tuple[int, int]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A stage is loaded and waits for plans."""

    stage_index: int
    pid: int
    kernels_name: str
    promise_holds: bool


class Loading(msgspec.Struct, frozen=True, tag=True):
    """A stage has loaded `done` of `total` of its weights."""

    stage_index: int
    done: int
    total: int


class Failure(msgspec.Struct, frozen=True, tag=True):
    """A stage cannot go on and ends."""

    stage_index: int
    pid: int
    reason: str


class Result(msgspec.Struct, frozen=True, tag=True):
    """An encoded `StepResult`."""

    encoded: bytes


class Closing(msgspec.Struct, frozen=True, tag=True):
    """The driver tells its own receiver to end."""


ToDriver = Hello | Loading | Failure | Result | Closing
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToDriver] = msgspec.msgpack.Decoder(ToDriver)


MAX_ADDRESS_BYTES = 107
"""What Linux allows the path of a local socket, less the closing zero."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of one pipeline."""

    directory: Path

    @classmethod
    def create(cls) -> Endpoints:
        """Addresses in a new directory of the system's temporary one.

        Raises:
            OSError: its path is too long for a socket's address.
        """
        directory = Path(tempfile.mkdtemp(prefix="tokentight-"))
        length = len(os.fsencode(directory / "stage-999"))
        if length > MAX_ADDRESS_BYTES:
            directory.rmdir()
            raise OSError(
                f"socket addresses in {directory.parent} have {length} bytes; at most "
                f"{MAX_ADDRESS_BYTES} are allowed: set TMPDIR to a directory with a shorter path"
            )
        return cls(directory)

    def stage(self, index: int) -> str:
        return f"ipc://{self.directory}/stage-{index}"

    @property
    def driver(self) -> str:
        return f"ipc://{self.directory}/driver"

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def to_driver(socket: zmq.Socket[bytes], message: ToDriver) -> None:
    socket.send(_encoder.encode(message))


def from_stage(socket: zmq.Socket[bytes]) -> ToDriver:
    return _decoder.decode(socket.recv())


def send_plan(socket: zmq.Socket[bytes], encoded_plan: bytes) -> None:
    socket.send(encoded_plan)


def send_hidden(
    socket: zmq.Socket[bytes], encoded_plan: bytes, step: int, epoch: int, hidden: Tensor
) -> None:
    """Pass a plan on with the hidden states (float32 `[T, H]`) that belong to it."""
    header = HiddenHeader(
        step, epoch, codec.digest_of(encoded_plan), (hidden.shape[0], hidden.shape[1])
    )
    payload = hidden.contiguous().cpu().numpy().data
    socket.send_multipart([encoded_plan, _encoder.encode(header), payload], copy=False)


def receive(socket: zmq.Socket[bytes]) -> tuple[bytes, HiddenHeader | None, Tensor | None]:
    """An encoded plan, and the hidden states that came with it.

    Raises:
        MalformedMessageError: what came is neither.
    """
    frames = socket.recv_multipart()
    if len(frames) == 1:
        return frames[0], None, None
    if len(frames) != 3:
        raise codec.MalformedMessageError(f"{len(frames)} frames; a plan has 1 or 3")
    try:
        header = msgspec.msgpack.decode(frames[1], type=HiddenHeader)
        values = np.frombuffer(bytearray(frames[2]), np.float32).reshape(header.shape)
    except (msgspec.DecodeError, ValueError) as error:
        raise codec.MalformedMessageError(f"hidden states: {error}") from error
    return frames[0], header, torch.from_numpy(values)
