"""What a stage needs to know to start, and how it is loaded from that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from tokentight.kernels.select import KernelChoice, load_kernels
from tokentight.kernels.selftest import ModelShapes, fit_kernels
from tokentight.models.checkpoint import WeightDtype, open_checkpoint
from tokentight.models.config import ModelConfig
from tokentight.models.decoder import DecoderStage
from tokentight.models.partition import LayerRange
from tokentight.pipeline.stage import Stage

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: which layers of which model, with what memory and threads.

    `cpus` is where the stage's process may run; None leaves it to the operating system.
    """

    model_path: str
    dtype: WeightDtype
    stage_index: int
    num_stages: int
    first_layer: int
    last_layer: int
    has_embedding: bool
    has_head: bool
    kernels: KernelChoice
    device: str
    num_threads: int
    cpus: tuple[int, ...] | None
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.first_layer, self.last_layer, self.has_embedding, self.has_head)


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage that is ready, and what is known of its kernels."""

    stage: Stage
    kernels_name: str
    promise_holds: bool


def load_stage(spec: StageSpec, progress: Progress | None = None) -> LoadedStage:
    """Load weights, allocate KV and check the kernels on this machine."""
    checkpoint = open_checkpoint(Path(spec.model_path), spec.dtype)
    kernels = load_kernels(spec.kernels, spec.num_threads, spec.device)
    if kernels.name == "native":  # they have threads of their own; torch's would only compete
        torch.set_num_threads(1)
    # The whole model's shapes, so that every stage comes to the same kernels.
    kernels, self_test = fit_kernels(kernels, _shapes(checkpoint.config, spec.block_size))
    logger.log(logging.INFO if self_test.holds else logging.WARNING, self_test.summary())
    decoder = DecoderStage.load(checkpoint, spec.layers, kernels, spec.max_model_len, progress)
    decoder.allocate_kv(spec.num_blocks, spec.block_size)
    return LoadedStage(
        stage=Stage(decoder, kernels, spec.block_size),
        kernels_name=kernels.name,
        promise_holds=self_test.holds,
    )


def _shapes(model: ModelConfig, block_size: int) -> ModelShapes:
    heads, hidden = model.heads, model.hidden_size
    query_size = heads.num_heads * heads.head_dim
    key_value_size = heads.num_kv_heads * heads.head_dim
    return ModelShapes(
        hidden_size=hidden,
        intermediate_size=model.intermediate_size,
        heads=heads,
        block_size=block_size,
        matrices=(
            (query_size + 2 * key_value_size, hidden),
            (hidden, query_size),
            (2 * model.intermediate_size, hidden),
            (hidden, model.intermediate_size),
            (model.vocab_size, hidden),
        ),
        weight_dtype=model.weight_dtype,
    )
