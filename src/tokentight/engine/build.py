"""From an `EngineConfig` to a running step loop: model, memory, stages."""

from __future__ import annotations

import logging
import os
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokentight.engine.admission import Admission
from tokentight.engine.config import ConfigError, EngineConfig
from tokentight.engine.core import CoreConfig, EngineCore
from tokentight.engine.memory import MemoryPlan, available_memory, plan_memory
from tokentight.engine.scheduler import SchedulerLimits
from tokentight.engine.status import EngineInfo
from tokentight.models.checkpoint import open_checkpoint
from tokentight.models.config import ModelConfig
from tokentight.models.partition import LayerRange, split_layers
from tokentight.models.resolve import resolve_model
from tokentight.models.tokenizer import Tokenizer
from tokentight.pipeline.in_process import InProcessPipeline
from tokentight.pipeline.interface import Pipeline
from tokentight.pipeline.processes import LoadingProgress, ProcessPipeline
from tokentight.pipeline.spec import StageSpec, load_stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A step loop and what stands around it. Closing the pipeline ends the stages."""

    core: EngineCore
    pipeline: Pipeline
    tokenizer: Tokenizer
    admission: Admission
    info: EngineInfo


def build_engine(
    config: EngineConfig,
    on_recovery: Callable[[str | None], None],
    progress: LoadingProgress | None = None,
) -> EngineParts:
    """Load the model and start its stages.

    Raises:
        ConfigError: a setting cannot work with this model on this machine.
        CheckpointError, UnsupportedModelError: the model cannot be read or served.
        PipelineStartError: a stage did not start.
    """
    if config.max_num_seqs > config.max_num_batched_tokens:
        logger.warning(
            "max_num_seqs is %d and a step computes max_num_batched_tokens %d: not every running "
            "request gets a token in every step",
            config.max_num_seqs,
            config.max_num_batched_tokens,
        )
    path = resolve_model(config.model)
    model = open_checkpoint(path, config.dtype).config
    stages = split_stages(config, model)
    memory = plan_memory(config, model, stages, available_memory(config.device))
    tokenizer = Tokenizer.load(path)
    specs = stage_specs(config, str(path), stages, memory)
    pipeline = start_pipeline(specs, progress)
    eos_token_ids = frozenset(model.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
    core = EngineCore(
        CoreConfig(
            limits=SchedulerLimits(
                config.max_num_seqs, config.max_num_batched_tokens, config.pipeline_parallel_size
            ),
            num_blocks=memory.num_blocks,
            block_size=config.block_size,
            max_model_len=memory.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            eos_token_ids=eos_token_ids,
            max_stage_restarts=config.max_stage_restarts,
            stage_restart_window_s=config.stage_restart_window_s,
        ),
        pipeline,
        tokenizer,
        seed_source(config.seed),
        on_recovery,
    )
    info = EngineInfo(
        model=config.model,
        max_model_len=memory.max_model_len,
        vocab_size=model.vocab_size,
        num_stages=pipeline.num_stages,
        kernels=pipeline.kernels_name,
        promise_holds=pipeline.promise_holds,
        num_kv_blocks=memory.num_blocks,
        block_size=config.block_size,
    )
    admission = Admission(model.vocab_size, memory.max_model_len)
    return EngineParts(core, pipeline, tokenizer, admission, info)


def split_stages(config: EngineConfig, model: ModelConfig) -> tuple[LayerRange, ...]:
    """The layers of each stage.

    Raises:
        ConfigError: there are more stages than layers.
    """
    try:
        return split_layers(model, config.pipeline_parallel_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def stage_specs(
    config: EngineConfig, model_path: str, stages: Sequence[LayerRange], memory: MemoryPlan
) -> list[StageSpec]:
    """Divide the machine among the stages: threads evenly, each on CPUs of its own if they
    suffice, so that the stages' threads do not compete."""
    cpus = _usable_cpus()
    num_threads = config.num_threads or len(cpus)
    per_stage = max(1, num_threads // len(stages))
    pinned = len(stages) > 1 and per_stage * len(stages) <= len(cpus)
    return [
        StageSpec(
            model_path=model_path,
            dtype=config.dtype,
            stage_index=index,
            num_stages=len(stages),
            first_layer=stage.first,
            last_layer=stage.last,
            has_embedding=stage.has_embedding,
            has_head=stage.has_head,
            kernels=config.kernels,
            device=config.device,
            num_threads=per_stage,
            cpus=tuple(cpus[index * per_stage : (index + 1) * per_stage]) if pinned else None,
            num_blocks=memory.num_blocks,
            block_size=config.block_size,
            max_model_len=memory.max_model_len,
        )
        for index, stage in enumerate(stages)
    ]


def start_pipeline(specs: Sequence[StageSpec], progress: LoadingProgress | None) -> Pipeline:
    """One stage runs in this process, several in processes of their own."""
    if len(specs) > 1:
        return ProcessPipeline(specs, progress)

    def one_stage(done: int, total: int) -> None:
        if progress is not None:
            progress(0, done, total)

    return InProcessPipeline([load_stage(specs[0], one_stage)])


def seed_source(seed: int | None) -> Callable[[], int]:
    """Draws a seed for each request that brings none."""
    if seed is None:
        return lambda: secrets.randbits(64)
    generator = random.Random(seed)
    return lambda: generator.getrandbits(64)


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
