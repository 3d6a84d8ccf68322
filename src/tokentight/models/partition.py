"""Which layers each pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from tokentight.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers `first..last - 1`, with the embedding before and the head after them or not."""

    first: int
    last: int
    has_embedding: bool
    has_head: bool

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(f"layers {self.first}..{self.last} (exclusive) are not a range")
        if self.has_embedding != (self.first == 0):
            raise ValueError("the stage with the first layer has the embedding, and no other")

    @property
    def num_layers(self) -> int:
        return self.last - self.first


def whole_model(config: ModelConfig) -> LayerRange:
    """All layers, the embedding and the head: the one stage of a model that is not split."""
    return LayerRange(0, config.num_layers, has_embedding=True, has_head=True)


def split_layers(config: ModelConfig, num_stages: int) -> tuple[LayerRange, ...]:
    """Split the layers into `num_stages` contiguous ranges so that the costliest is cheapest.

    Cost is the weights that a decode step reads: every layer's, and the head's on the last stage.
    The embedding is a gather of a few rows and counts nothing.

    Raises:
        ValueError: when there are more stages than layers, or fewer than one.
    """
    if not 1 <= num_stages <= config.num_layers:
        raise ValueError(
            f"pipeline_parallel_size is {num_stages}; the model has {config.num_layers} layers and "
            f"every stage needs at least one, so it must be in [1, {config.num_layers}]"
        )
    counts = _layer_counts(config, num_stages)
    ranges, first = [], 0
    for count in counts:
        last = first + count
        ranges.append(LayerRange(first, last, first == 0, last == config.num_layers))
        first = last
    return tuple(ranges)


def _layer_counts(config: ModelConfig, num_stages: int) -> list[int]:
    if num_stages == 1:
        return [config.num_layers]
    layer = config.layer_matrix_parameters + config.layer_vector_parameters
    head = config.embedding_parameters
    others = num_stages - 1

    def worst(on_last: int) -> tuple[int, int]:
        fullest = -(-(config.num_layers - on_last) // others)
        # Among equals the most layers on the last stage, so that the others are the lighter.
        return max(fullest * layer, on_last * layer + head), -on_last

    on_last = min(range(1, config.num_layers - others + 1), key=worst)
    each, extra = divmod(config.num_layers - on_last, others)
    # Stages that hold one layer more stand late: the first also gathers the embedding.
    return [each] * (others - extra) + [each + 1] * extra + [on_last]
