"""Plans, hidden states and results as bytes, each under a digest of everything it says.

A message is `digest (32 bytes) | header length (4 bytes) | header | arrays`. The header (msgpack)
holds the scalars and every array's shape; the arrays follow in field order, each aligned to 8
bytes. The digest is SHA-256 over all that comes after it. Decoded arrays are read-only views of
the message.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokentight.pipeline import plan as plan_module
from tokentight.pipeline.plan import F32, I32, I64, U64, StepPlan, StepResult

DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 8
_DTYPES: dict[Any, np.dtype[Any]] = {
    I32: np.dtype(np.int32),
    I64: np.dtype(np.int64),
    U64: np.dtype(np.uint64),
    F32: np.dtype(np.float32),
}

Message = TypeVar("Message", StepPlan, StepResult)


class DigestMismatchError(ValueError):
    """A message whose bytes are not those its digest was made of."""


class MalformedMessageError(ValueError):
    """A message that is no message of the kind it should be."""


def encode(message: StepPlan | StepResult) -> bytes:
    """Encode a plan or a result; `digest_of` the bytes is its identity."""
    scalars: list[int | bytes] = []
    arrays: list[NDArray[Any]] = []
    _collect(message, scalars, arrays)
    header = msgspec.msgpack.encode((scalars, [array.shape for array in arrays]))
    parts = [_LENGTH.pack(len(header)), header]
    offset = _LENGTH.size + len(header)
    for array in arrays:
        padding = -offset % _ALIGNMENT
        parts.append(b"\0" * padding)
        parts.append(array.tobytes())
        offset += padding + array.nbytes
    body = b"".join(parts)
    return hashlib.sha256(body).digest() + body


def digest_of(encoded: bytes) -> bytes:
    """The digest an encoded message carries (not yet checked against its bytes)."""
    return encoded[:DIGEST_BYTES]


def decode_plan(encoded: bytes) -> StepPlan:
    """Decode and verify a plan.

    Raises:
        DigestMismatchError: the bytes are not those the digest was made of.
        MalformedMessageError: the bytes are no plan.
    """
    return _decode(StepPlan, encoded)


def decode_result(encoded: bytes) -> StepResult:
    """Decode and verify a result; raises as `decode_plan` does."""
    return _decode(StepResult, encoded)


def _decode(kind: type[Message], encoded: bytes) -> Message:
    body = memoryview(encoded)[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != encoded[:DIGEST_BYTES]:
        raise DigestMismatchError(
            f"a {kind.__name__} of {len(encoded)} bytes does not match its digest "
            f"{encoded[:8].hex()}…"
        )
    try:
        (header_length,) = _LENGTH.unpack_from(body)
        start = _LENGTH.size + header_length
        scalars, shapes = msgspec.msgpack.decode(body[_LENGTH.size : start])
        reader = _ArrayReader(body, start, shapes)
        message: Message = _restore(kind, list(scalars), reader)
        reader.expect_end()
    except (struct.error, msgspec.DecodeError, ValueError, TypeError, IndexError) as error:
        raise MalformedMessageError(f"not a {kind.__name__}: {error}") from error
    return message


def _collect(node: object, scalars: list[int | bytes], arrays: list[NDArray[Any]]) -> None:
    kind: Any = type(node)
    for name, hint in _fields_of(kind):
        value = getattr(node, name)
        if hint in _DTYPES:
            if value.dtype != _DTYPES[hint]:
                raise TypeError(f"{name} has dtype {value.dtype}; it must be {_DTYPES[hint]}")
            arrays.append(value)
        elif hint in (int, bytes):
            scalars.append(value)
        else:
            _collect(value, scalars, arrays)


class _ArrayReader:
    def __init__(self, body: memoryview, offset: int, shapes: list[list[int]]) -> None:
        self._body = body
        self._offset = offset
        self._shapes = iter(shapes)

    def next(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        known = next(self._shapes, None)
        if known is None:
            raise ValueError("an array is missing")
        shape = tuple(known)
        self._offset += -self._offset % _ALIGNMENT
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(self._body, dtype, count, self._offset).reshape(shape)
        self._offset += count * dtype.itemsize
        return array

    def expect_end(self) -> None:
        if self._offset != len(self._body) or next(self._shapes, None) is not None:
            raise ValueError(f"{len(self._body) - self._offset} bytes left over")


def _restore(kind: Any, scalars: list[int | bytes], reader: _ArrayReader) -> Any:
    values: dict[str, Any] = {}
    for name, hint in _fields_of(kind):
        if hint in _DTYPES:
            values[name] = reader.next(_DTYPES[hint])
        elif hint in (int, bytes):
            value = scalars.pop(0)
            if not isinstance(value, hint):
                raise ValueError(f"{name} is a {type(value).__name__}")
            values[name] = value
        else:
            values[name] = _restore(hint, scalars, reader)
    return kind(**values)


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind, vars(plan_module))
    return tuple((field.name, hints[field.name]) for field in fields(kind))
