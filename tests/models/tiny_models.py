"""Random tiny checkpoints made with transformers, which is also the oracle for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokentight.kernels.interface import Kernels, StepInputs
from tokentight.models.checkpoint import Checkpoint
from tokentight.models.decoder import DecoderStage
from tokentight.models.partition import LayerRange, split_layers

VOCAB_SIZE = 160
MAX_POSITIONS = 64
BLOCK_SIZE = 16
NUM_BLOCKS = 16

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama3_rope() -> dict[str, Any]:
    """RoPE of Llama 3.1, with an original length short enough that all its branches are used."""
    return {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def yarn_rope() -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def linear_rope() -> dict[str, Any]:
    return {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": llama3_rope()}),
    "llama-linear-rope": ("Llama", {"rope_parameters": linear_rope()}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": yarn_rope()}),
    "mistral-window": ("Mistral", {"sliding_window": 11, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-from-layer-1": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biases-yarn": (
        "Qwen3",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": yarn_rope()},
    ),
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A transformers model of `family` whose every parameter is random, norms and biases too."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **overrides})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.12 * noise)
    return model.to(dtype).eval()


def save_tiny(directory: Path, case: str, **save: Any) -> Any:
    """Save the named case of `CASES` under `directory` and return the transformers model."""
    family, overrides = CASES[case]
    model = tiny_model(family, **overrides)
    model.save_pretrained(directory, **save)
    return model


def prompt_of(length: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def step_of(token_ids: Sequence[int], start: int, blocks: Sequence[int]) -> StepInputs:
    """A step with one row: `token_ids` at positions from `start` on, KV in `blocks`."""
    positions = torch.arange(start, start + len(token_ids))
    table = torch.tensor(blocks, dtype=torch.int32)
    slots = table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=positions.int(),
        slots=slots,
        query_starts=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        context_lens=torch.tensor([start + len(token_ids)], dtype=torch.int32),
        block_tables=table[None],
        block_size=BLOCK_SIZE,
    )


@dataclass
class Pipeline:
    """Stages run one after the other in this process, for one request."""

    stages: list[DecoderStage]
    blocks: list[int] = field(default_factory=lambda: [9, 3, 14, 1])

    @classmethod
    def load(cls, checkpoint: Checkpoint, kernels: Kernels, num_stages: int = 1) -> Pipeline:
        return cls.of_ranges(checkpoint, kernels, split_layers(checkpoint.config, num_stages))

    @classmethod
    def of_ranges(
        cls, checkpoint: Checkpoint, kernels: Kernels, ranges: Sequence[LayerRange]
    ) -> Pipeline:
        stages = [DecoderStage.load(checkpoint, r, kernels, MAX_POSITIONS, None) for r in ranges]
        for stage in stages:
            stage.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        return cls(stages)

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """Logits `[T, V]` of every position, computed `chunk` tokens at a time."""
        chunk = chunk or len(token_ids)
        parts = []
        for start in range(0, len(token_ids), chunk):
            step = step_of(token_ids[start : start + chunk], start, self.blocks)
            hidden = None
            for stage in self.stages:
                hidden = stage.forward(step, hidden)
            assert hidden is not None
            parts.append(self.stages[-1].logits(hidden))
        return torch.cat(parts)
