"""Which kernels serve."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from tokentight.kernels.errors import NativeUnavailable
from tokentight.kernels.interface import Kernels

KernelChoice = Literal["auto", "native", "reference"]

_log = logging.getLogger(__name__)


def load_kernels(
    choice: KernelChoice,
    num_threads: int,
    device: str = "cpu",
    cpus: Sequence[int] | None = None,
) -> Kernels:
    """The kernels named by `choice`, on `num_threads` threads.

    `auto` takes the native ones on the CPU and, where they cannot be built, says so in one warning
    and takes the reference. The reference on the CPU runs on torch's threads, whose number this
    sets for the process. `cpus` pins the native threads but the first. Raises `NativeUnavailable`
    for `native` where it cannot be built, `ValueError` for impossible arguments.
    """
    if choice not in ("auto", "native", "reference"):
        raise ValueError(f"kernels is {choice!r}; choose auto, native or reference")
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; give at least 1")
    on_cpu = torch.device(device).type == "cpu"
    if choice == "native" and not on_cpu:
        raise ValueError(f"the native kernels run on the CPU, not on {device}; choose reference")
    if choice != "reference" and on_cpu:
        try:
            from tokentight.kernels.native import NativeKernels

            return NativeKernels(num_threads, cpus)
        except NativeUnavailable as reason:
            if choice == "native":
                raise
            _log.warning("native kernels unavailable, the slower reference serves: %s", reason)
    from tokentight.kernels.reference import ReferenceKernels

    if on_cpu:
        torch.set_num_threads(num_threads)
    return ReferenceKernels(device)
