"""Rotary position embeddings: which frequencies a model was trained with, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokentight.kernels.interface import RopeTable
from tokentight.models.errors import UnsupportedModelError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_DEFAULT_THETA = 10000.0
_DEFAULT_LOW_FREQ_FACTOR = 1.0
_DEFAULT_HIGH_FREQ_FACTOR = 4.0
_DEFAULT_BETA_FAST = 32.0
_DEFAULT_BETA_SLOW = 1.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How the angle of dimension pair `i` at position `p` is `p * frequency[i]`.

    `linear` divides positions by `factor` (https://arxiv.org/abs/2306.15595), `llama3` blends by
    wavelength, `yarn` blends by dimension and scales cosines and sines by `attention_factor`
    (https://arxiv.org/abs/2309.00071). `frequency_factors`, one per pair, divide the frequencies
    of a GGUF file that carries them as a tensor.
    """

    rope_type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = _DEFAULT_LOW_FREQ_FACTOR
    high_freq_factor: float = _DEFAULT_HIGH_FREQ_FACTOR
    attention_factor: float = 1.0
    beta_fast: float = _DEFAULT_BETA_FAST
    beta_slow: float = _DEFAULT_BETA_SLOW
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in SUPPORTED_ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {self.rope_type!r} is not supported: its frequencies depend on the "
                "length of the request, or are not known here, so answers could not be "
                f"independent of chunking; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        for name in ("theta", "factor", "attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UnsupportedModelError(f"rope {name} is {value}; it must be above 0")
        if self.rope_type in ("llama3", "yarn") and self.original_max_positions <= 0:
            raise UnsupportedModelError(
                "rope original_max_position_embeddings is "
                f"{self.original_max_positions}; {self.rope_type} needs it above 0"
            )
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise UnsupportedModelError(
                f"rope high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises:
            UnsupportedModelError: for scalings that cannot be served, naming the supported ones.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise UnsupportedModelError(
                f"rope_parameters per layer type ({', '.join(scaling)}) are not supported; "
                "one set for all layers is"
            )
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial is not None and partial != 1.0:
            raise UnsupportedModelError(
                f"partial_rotary_factor is {partial}; only rotation of whole heads (1.0) is "
                "supported"
            )
        rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
        theta = scaling.get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA
        if rope_type == "default":
            return cls(theta=float(theta))
        if rope_type not in SUPPORTED_ROPE_TYPES:
            return cls(rope_type=rope_type)
        original = (
            config.get("original_max_position_embeddings")
            or scaling.get("original_max_position_embeddings")
            or config.get("max_position_embeddings")
            or 0
        )
        factor = scaling.get("factor")
        if factor is None:
            if rope_type != "yarn" or not original:
                raise UnsupportedModelError(f"rope type {rope_type!r} needs a factor; none is set")
            factor = config.get("max_position_embeddings", original) / original
        if rope_type == "llama3":
            missing = [n for n in ("low_freq_factor", "high_freq_factor") if n not in scaling]
            if missing:
                raise UnsupportedModelError(f"rope type 'llama3' needs {' and '.join(missing)}")
        truncate = scaling.get("truncate")
        return cls(
            rope_type=rope_type,
            theta=float(theta),
            factor=float(factor),
            original_max_positions=int(original),
            low_freq_factor=float(scaling.get("low_freq_factor") or _DEFAULT_LOW_FREQ_FACTOR),
            high_freq_factor=float(scaling.get("high_freq_factor") or _DEFAULT_HIGH_FREQ_FACTOR),
            attention_factor=_attention_factor(scaling, factor) if rope_type == "yarn" else 1.0,
            beta_fast=float(scaling.get("beta_fast") or _DEFAULT_BETA_FAST),
            beta_slow=float(scaling.get("beta_slow") or _DEFAULT_BETA_SLOW),
            truncate=True if truncate is None else bool(truncate),
        )


def rope_table(config: RopeConfig, head_dim: int, max_positions: int) -> RopeTable:
    """Cosines and sines of positions `0..max_positions - 1`: float32 `[max_positions, head_dim/2]`.

    Computed in float64 and rounded once, so the table does not depend on how long it is.
    """
    angles = torch.outer(
        torch.arange(max_positions, dtype=torch.float64), _frequencies(config, head_dim)
    )
    scale = config.attention_factor
    return RopeTable(cos=(angles.cos() * scale).float(), sin=(angles.sin() * scale).float())


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's scale of cosines and sines, as given or as its authors recommend."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    plain = config.theta ** -(pairs / head_dim)
    if config.frequency_factors is not None:
        plain = plain / torch.tensor(config.frequency_factors, dtype=torch.float64)
    if config.rope_type == "linear":
        return plain / config.factor
    if config.rope_type == "llama3":
        return _llama3_frequencies(config, plain)
    if config.rope_type == "yarn":
        return _yarn_frequencies(config, plain, head_dim)
    return plain


def _llama3_frequencies(config: RopeConfig, plain: Tensor) -> Tensor:
    """Short wavelengths as they are, long ones stretched by `factor`, a blend between."""
    turns = config.original_max_positions * plain / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn_frequencies(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often as they are, slow ones stretched, a linear ramp between."""

    def dim_of(turns: float) -> float:
        ratio = config.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dim_of(config.beta_fast), dim_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)
    ramp = ramp.clamp(0.0, 1.0)
    return plain / config.factor * ramp + plain * (1 - ramp)
