"""The C kernels' functions, with their argument types, and the thread pool they run on."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from tokentight.kernels.errors import NativeUnavailable

_P, _I, _F, _B = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
# name: (argument types after the pool, result type)
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "tt_pack": ([_P, _P, _I, _I, _B], None),
    "tt_embed": ([_P, _P, _P, _I, _I, _I, _B], _I),
    "tt_linear": ([_P, _P, _P, _P, _I, _I, _I, _B], None),
    "tt_rms_norm": ([_P, _P, _P, _I, _I, _F], None),
    "tt_add_rms_norm": ([_P, _P, _P, _P, _I, _I, _F], None),
    "tt_silu_mul": ([_P, _P, _I, _I], None),
    "tt_argmax": ([_P, _P, _I, _I], None),
    "tt_logsumexp": ([_P, _P, _I, _I], None),
    "tt_softmax": ([_P, _P, _I, _I], None),
    "tt_exp": ([_P, _P, _I], None),
    "tt_rope_and_cache": ([_P] * 10 + [_I] * 7 + [_F], _I),
    "tt_attention": ([_P] * 8 + [_I] * 9 + [_F], _I),
}


def load_library(path: Path) -> ctypes.CDLL:
    """Load the compiled kernels. Raises `NativeUnavailable` where the loader refuses the file."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_P, *arguments]
            function.restype = result
        library.tt_prefer_huge_pages.argtypes = [_P, _I]
        library.tt_prefer_huge_pages.restype = None
        library.tt_pool_create.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
        library.tt_pool_create.restype = _P
        library.tt_pool_destroy.argtypes = [_P]
        library.tt_pool_destroy.restype = None
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(
            f"the compiled kernels {path} cannot be loaded ({error}); remove that file, or set "
            "TOKENTIGHT_CACHE_DIR to a directory on a file system that allows execution"
        ) from error
    return library


class ThreadPool:
    """`num_threads` threads, the calling one included; ended by `close()` or with the object."""

    def __init__(
        self, library: ctypes.CDLL, num_threads: int, cpus: Sequence[int] | None = None
    ) -> None:
        """`cpus`: one CPU per thread, pinned; the first is the caller's, who pins itself.

        Raises `ValueError` for an impossible count or CPU, `NativeUnavailable` if threads fail.
        """
        if not 1 <= num_threads <= 1024:
            raise ValueError(f"num_threads is {num_threads}; give a number from 1 to 1024")
        pinned = None
        if cpus is not None:
            allowed = os.sched_getaffinity(0)
            if len(cpus) != num_threads or not set(cpus) <= allowed:
                raise ValueError(
                    f"cpus is {list(cpus)}; give {num_threads} CPUs, one per thread, "
                    f"out of {sorted(allowed)}"
                )
            pinned = (ctypes.c_int * max(1, num_threads - 1))(*cpus[1:])
        handle = library.tt_pool_create(num_threads, pinned)
        if not handle:
            raise NativeUnavailable(
                f"{num_threads} threads could not be started; lower the thread count or raise "
                "the process limit (ulimit -u)"
            )
        self.num_threads = num_threads
        self._handle: int | None = handle
        self._finalizer = weakref.finalize(self, library.tt_pool_destroy, handle)

    @property
    def handle(self) -> int:
        """The pool's address. Raises `RuntimeError` once closed."""
        if self._handle is None:
            raise RuntimeError("these kernels are closed; load new ones")
        return self._handle

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        self._handle = None
        self._finalizer()
