"""The GGUF container: metadata and where each tensor lies.

Written out here because it is read at every start by every process: a vocabulary of 49,000 tokens
takes the `gguf` package's reader three seconds and this one a tenth of one. The format is
described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentight.models.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` is `[out, in]`, `type_id` a `gguf.GGMLQuantizationType`."""

    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file, its data mapped into memory and read on use."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: mmap.mmap

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the metadata and the tensor directory.

        Raises:
            CheckpointError: when the file is not GGUF, of another version, or cut short.
        """
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            metadata, tensors = _Parser(data).parse()
        except (struct.error, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointError(
                f"{path} is cut short or damaged ({error}); fetch it again"
            ) from error
        except CheckpointError as error:
            raise CheckpointError(f"{path} {error}") from None
        return cls(path, metadata, tensors, data)

    def bytes_of(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        """The raw bytes of a tensor, read-only and not copied."""
        offset = self.tensors[name].offset
        if offset + num_bytes > len(self.data):
            raise CheckpointError(
                f"{self.path} is cut short: {name} ends at byte {offset + num_bytes}, the file "
                f"has {len(self.data)}. Fetch it again"
            )
        return np.frombuffer(self.data, dtype=np.uint8, count=num_bytes, offset=offset)


class _Parser:
    """A cursor over the file's head."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        (version,) = self._take("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"is GGUF version {version}; supported are {', '.join(map(str, _VERSIONS))}, "
                "little-endian"
            )
        num_tensors, num_entries = self._take("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(*self._take("I"))
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"has general.alignment {alignment!r}; it must be above 0")
        start = -(-self._at // alignment) * alignment
        tensors = {
            name: GgufTensor(shape, type_id, start + offset)
            for name, shape, type_id, offset in entries
        }
        return metadata, tensors

    def _take(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        return str(self._raw_string(), "utf-8")

    def _raw_string(self) -> bytes:
        (length,) = self._take("Q")
        end = self._at + length
        if end > len(self._data):
            raise IndexError(f"a string of {length} bytes passes the end of the file")
        raw = self._data[self._at : end]
        self._at = end
        return raw

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            # Some vocabularies hold tokens that are not whole characters.
            return str(self._raw_string(), "utf-8", "surrogateescape")
        if kind == _ARRAY:
            item_kind, count = self._take("IQ")
            if item_kind in _SCALARS:
                return list(self._take(f"{count}{_SCALARS[item_kind]}"))
            if item_kind == _ARRAY:
                raise CheckpointError("holds an array of arrays, which no supported model needs")
            return [self._value(item_kind) for _ in range(count)]
        return self._take(_SCALARS[kind])[0]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._take("I")
        dims = self._take(f"{num_dims}Q")
        type_id, offset = self._take("IQ")
        return name, tuple(reversed(dims)), type_id, offset
