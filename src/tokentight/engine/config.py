"""How an engine is set up. The command line reads its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["auto", "float32", "bfloat16"]
KernelChoice = Literal["auto", "native", "reference"]

KERNEL_TILE_POSITIONS = 16
"""Attention walks the KV in tiles of this many positions; a block holds whole tiles."""


class ConfigError(ValueError):
    """A setting that cannot work; the message names it, its value and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        model: a directory of safetensors, a GGUF file, a hub id or a built-in alias.
        dtype: how weights are stored in memory; `auto` keeps the checkpoint's type.
        max_model_len: tokens of prompt and output together; None for the model's own limit.
        pipeline_parallel_size: stages; more than one run as processes of their own.
        max_num_seqs: requests computed at the same time.
        max_num_batched_tokens: tokens computed in one step.
        block_size: positions in a KV block, a multiple of 16.
        enable_prefix_caching: reuse the KV of equal prefixes.
        kv_cache_memory: bytes for KV over all stages; None for a share of what is free.
        seed: seeds the seeds of requests that bring none; None for true randomness.
        kernels: `auto` takes the native ones and falls back to the reference.
        num_threads: CPU threads over all stages; None for all this process may use.
        device: where the reference kernels run.
        max_queued_requests: unfinished requests beyond `max_num_seqs` before new ones are refused.
        max_stage_restarts: restarts of lost stages in `stage_restart_window_s` seconds before the
            engine gives up.
    """

    model: str
    dtype: DType = "auto"
    max_model_len: int | None = None
    pipeline_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_memory: int | None = None
    seed: int | None = None
    kernels: KernelChoice = "auto"
    num_threads: int | None = None
    device: str = "cpu"
    max_queued_requests: int = 1024
    max_stage_restarts: int = 3
    stage_restart_window_s: float = 600.0

    def __post_init__(self) -> None:
        for name in (
            "pipeline_parallel_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "kv_cache_memory", "num_threads"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        for name in ("max_queued_requests", "max_stage_restarts"):
            _at_least(name, getattr(self, name), 0)
        if self.block_size % KERNEL_TILE_POSITIONS:
            raise ConfigError(
                f"block_size is {self.block_size}; it must be a multiple of {KERNEL_TILE_POSITIONS}"
            )
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype is {self.dtype!r}; it must be auto, float32 or bfloat16")
        if self.kernels not in ("auto", "native", "reference"):
            raise ConfigError(f"kernels is {self.kernels!r}; it must be auto, native or reference")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} is {value}; it must be at least {low}")
