"""What machine this is, and what it can do, measured before and after the engines."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

BUSY = 0.25  # of a core, by the load average


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Floating-point operations and bytes read per second, as measured."""

    flops: float
    read_bandwidth: float

    def best(self, other: MachineRates) -> MachineRates:
        """The better of each: other work on the machine only ever lowers a rate."""
        return MachineRates(
            max(self.flops, other.flops), max(self.read_bandwidth, other.read_bandwidth)
        )


def measure_machine() -> MachineRates:
    """The best rates seen in about two seconds, with torch's default thread count."""
    left, right = torch.randn(512, 1536), torch.randn(1536, 1536)
    product = torch.empty(512, 1536)
    product_seconds = _best(lambda: torch.mm(left, right, out=product))
    memory = torch.ones(64 * 2**20)  # 256 MiB: more than the caches hold
    read_seconds = _best(memory.sum)
    return MachineRates(
        flops=2 * 512 * 1536 * 1536 / product_seconds,
        read_bandwidth=memory.numel() * memory.element_size() / read_seconds,
    )


def describe_machine() -> dict[str, object]:
    """What belongs beside every number. The load average is that of the moment."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _best(work: Callable[[], object], seconds: float = 1.0) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
