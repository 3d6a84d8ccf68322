"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class EngineStatus(Enum):
    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine runs.

    `promise_holds` is False where the kernels were found not to be row-invariant on this machine:
    the engine then serves without the promise that answers do not depend on load.
    """

    model: str
    max_model_len: int
    vocab_size: int
    num_stages: int
    kernels: str
    promise_holds: bool
    num_kv_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of now (`kv_cache_usage` from 0 to 1) and counters since the start.

    Prefix-cache counters count tokens: looked up, and found.
    """

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    audit_violations: int
    stage_restarts: int
