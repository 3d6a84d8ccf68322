"""The least time that this machine needs for a workload, from its own measured rates.

Matrix products at the rate that `torch.mm` reaches, plus weights and KV at the read bandwidth:
what no engine of the same arithmetic can be far below. The head counts only for rows whose logits
are needed, and the weights are read once per step of the shortest schedule.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass
from pathlib import Path

from machine import MachineRates
from workload import Workload

BYTES_PER_VALUE = 4  # float32 weights and KV


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a token costs: parameters of the layers' and the head's matrices, KV values."""

    layer_parameters: int
    head_parameters: int
    kv_values_per_token: int
    vocab_size: int

    @property
    def weight_bytes(self) -> int:
        return BYTES_PER_VALUE * (self.layer_parameters + self.head_parameters)


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds that the parts take, and output tokens per second if nothing else took any."""

    product_seconds: float
    read_seconds: float
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        return self.product_seconds + self.read_seconds


def read_model_size(model: Path) -> ModelSize:
    """From a Llama-like model's `config.json`."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head_dim
    attention = hidden * (heads * head_dim + 2 * kv) + heads * head_dim * hidden
    layers = config["num_hidden_layers"]
    return ModelSize(
        layer_parameters=layers * (attention + 3 * hidden * config["intermediate_size"]),
        head_parameters=config["vocab_size"] * hidden,
        kv_values_per_token=layers * 2 * kv,
        vocab_size=config["vocab_size"],
    )


def floor_of(workload: Workload, model: ModelSize, machine: MachineRates) -> Floor:
    """The floor for `workload` under closed-loop concurrency."""
    num_computed = sum(len(r.prompt) + r.num_output_tokens - 1 for r in workload.requests)
    num_logits = workload.num_output_tokens
    flops = 2 * (model.layer_parameters * num_computed + model.head_parameters * num_logits)
    kv_tokens_read = sum(
        len(r.prompt) * r.num_output_tokens + r.num_output_tokens * (r.num_output_tokens - 1) // 2
        for r in workload.requests
    )
    read = num_steps(workload) * model.weight_bytes
    read += kv_tokens_read * model.kv_values_per_token * BYTES_PER_VALUE
    product_seconds = flops / machine.flops
    read_seconds = read / machine.read_bandwidth
    return Floor(product_seconds, read_seconds, num_logits / (product_seconds + read_seconds))


def num_steps(workload: Workload) -> int:
    """Steps of the shortest schedule: one per output token, the first with the whole prompt."""
    slots = [0] * workload.concurrency
    for request in workload.requests:
        heapq.heapreplace(slots, slots[0] + request.num_output_tokens)
    return max(slots)
