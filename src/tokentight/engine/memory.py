"""How much memory goes to KV blocks, and whether the model fits at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tokentight.engine.config import ConfigError, EngineConfig
from tokentight.models.config import ModelConfig
from tokentight.models.partition import LayerRange

KV_SHARE = 0.4
"""Share of the memory left beside the weights that goes to KV unless `kv_cache_memory` says."""

MIB = 1024**2
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """KV blocks (the same number in every stage) and the context length they allow."""

    num_blocks: int
    max_model_len: int
    weight_bytes: int
    kv_bytes: int


def plan_memory(
    config: EngineConfig, model: ModelConfig, stages: Sequence[LayerRange], available: int
) -> MemoryPlan:
    """Divide `available` bytes between weights and KV.

    Raises:
        ConfigError: the model does not fit, or the KV cannot hold one request of the full length;
            it names the sizes and what would fit.
    """
    weight_bytes = sum(model.weight_bytes(stage) for stage in stages)
    if weight_bytes >= available:
        raise ConfigError(
            f"the weights take {_size(weight_bytes)} and {_size(available)} are free; use a "
            "smaller model, --dtype bfloat16, or free memory"
        )
    max_model_len = config.max_model_len or model.context_length
    if max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model is made for {model.context_length}"
        )
    block_bytes = config.block_size * sum(model.kv_bytes_per_token(stage) for stage in stages)
    left = available - weight_bytes
    if config.kv_cache_memory is not None and config.kv_cache_memory > left:
        raise ConfigError(
            f"kv_cache_memory is {_size(config.kv_cache_memory)}; {_size(left)} are free beside "
            "the weights"
        )
    budget = config.kv_cache_memory or int(left * KV_SHARE)
    per_request = -(-max_model_len // config.block_size)
    num_blocks = min(budget // block_bytes, per_request * config.max_num_seqs)
    if num_blocks < per_request:
        raise ConfigError(
            f"{_size(budget)} of KV hold {num_blocks * config.block_size} tokens, fewer than one "
            f"request of max_model_len {max_model_len}, which needs "
            f"{_size(per_request * block_bytes)}; lower --max-model-len or raise --kv-cache-memory"
        )
    return MemoryPlan(num_blocks, max_model_len, weight_bytes, num_blocks * block_bytes)


def available_memory(device: str) -> int:
    """Bytes that can be taken now on `device` without swapping."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available()
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    used = _read_int(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        free = min(free, limit - used)
    return free


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo tells no available memory; set --kv-cache-memory")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB"
