"""A contiguous range of decoder layers: the arithmetic of one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokentight.kernels.interface import Kernels, LayerKV, PackedMatrix, RopeTable, StepInputs
from tokentight.models.checkpoint import Checkpoint
from tokentight.models.config import ModelConfig
from tokentight.models.partition import LayerRange
from tokentight.models.rope import rope_table


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, packed: q, k and v are one matrix, gate and up another."""

    input_norm: Tensor
    qkv: PackedMatrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedMatrix
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: PackedMatrix
    gate_up_bias: Tensor | None
    down: PackedMatrix
    down_bias: Tensor | None
    window: int | None


@dataclass(slots=True)
class DecoderStage:
    """Layers `layers.first..layers.last - 1` with their weights and paged KV.

    It knows nothing of requests: what a step needs comes with the step. Between stages travels
    one tensor, the residual stream, so where the model is split does not change a bit of it.
    """

    config: ModelConfig
    layers: LayerRange
    kernels: Kernels
    rope: RopeTable
    weights: tuple[LayerWeights, ...]
    embedding: PackedMatrix | None
    final_norm: Tensor | None
    head: PackedMatrix | None
    kv: tuple[LayerKV, ...] = field(default=())

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        layers: LayerRange,
        kernels: Kernels,
        max_positions: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> DecoderStage:
        """Read and pack the weights of `layers`, and no others.

        `max_positions` is the longest context served. `progress(done, total)` is called after
        each layer and each of embedding and head.
        """
        config = checkpoint.config
        total = layers.num_layers + layers.has_embedding + layers.has_head
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        embedding = head = final_norm = None
        if layers.has_embedding:
            embedding = kernels.pack(checkpoint.tensor("model.embed_tokens.weight"))
            advance()
        weights = []
        for index in range(layers.first, layers.last):
            weights.append(_load_layer(checkpoint, index, kernels))
            advance()
        if layers.has_head:
            final_norm = checkpoint.tensor("model.norm.weight").to(kernels.device)
            tied = config.tie_word_embeddings
            if tied and embedding is not None:
                head = embedding
            else:
                name = "model.embed_tokens.weight" if tied else "lm_head.weight"
                head = kernels.pack(checkpoint.tensor(name))
            advance()
        table = rope_table(config.rope, config.heads.head_dim, max_positions)
        rope = RopeTable(table.cos.to(kernels.device), table.sin.to(kernels.device))
        return cls(config, layers, kernels, rope, tuple(weights), embedding, final_norm, head)

    @property
    def max_positions(self) -> int:
        """The longest context this stage can compute."""
        return self.rope.cos.shape[0]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the allocated KV."""
        return sum(layer.nbytes for layer in self.kv)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Zero-filled KV for every layer; what was there before is dropped first."""
        self.kv = ()
        self.kv = tuple(
            self.kernels.allocate_kv(self.config.heads, num_blocks, block_size)
            for _ in self.weights
        )

    @torch.inference_mode()
    def forward(self, step: StepInputs, hidden: Tensor | None = None) -> Tensor:
        """The residual stream after this stage's layers: float32 `[T, H]`.

        The first stage embeds `step.token_ids`; a later one takes the stream of the stage before
        as `hidden`, which it leaves untouched.

        Raises:
            ValueError: when `hidden` is given to the first stage or not to a later one, has
                another shape, or a token or position lies outside the model.
        """
        residual = self._entry(step, hidden)
        eps, kernels = self.config.rms_norm_eps, self.kernels
        pending: Tensor | None = None
        for layer, kv in zip(self.weights, self.kv, strict=True):
            if pending is None:
                x = kernels.rms_norm(residual, layer.input_norm, eps)
            else:
                x = kernels.add_rms_norm(pending, residual, layer.input_norm, eps)
            attended = self._attention(x, step, layer, kv)
            x = kernels.add_rms_norm(attended, residual, layer.post_norm, eps)
            gate_up = kernels.linear(x, layer.gate_up, layer.gate_up_bias)
            pending = kernels.linear(kernels.silu_mul(gate_up), layer.down, layer.down_bias)
        assert pending is not None, "a stage has at least one layer"
        return residual + pending

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the rows of `hidden`, a last stage's output: float32 `[L, H]` to `[L, V]`."""
        if self.head is None or self.final_norm is None:
            raise ValueError("only the last stage has the head that gives logits")
        normed = self.kernels.rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        return self.kernels.linear(normed, self.head)

    def _attention(self, x: Tensor, step: StepInputs, layer: LayerWeights, kv: LayerKV) -> Tensor:
        config, kernels = self.config, self.kernels
        qkv = kernels.linear(x, layer.qkv, layer.qkv_bias)
        q = kernels.rope_and_cache(
            qkv,
            step,
            kv,
            config.heads,
            self.rope,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
        )
        attended = kernels.attention(
            q, step, kv, config.heads, config.attention_scale, layer.window
        )
        return kernels.linear(attended, layer.output, layer.output_bias)

    def _entry(self, step: StepInputs, hidden: Tensor | None) -> Tensor:
        if not self.kv:
            raise ValueError("allocate_kv must be called before forward")
        # Kernels index memory with these, so a bad one must not reach them.
        _check_range("position", step.positions, self.max_positions)
        if self.embedding is not None:
            if hidden is not None:
                raise ValueError("the first stage embeds the tokens itself; hidden must be None")
            _check_range("token id", step.token_ids, self.config.vocab_size)
            return self.kernels.embed(self.embedding, step.token_ids)
        expected = (step.num_tokens, self.config.hidden_size)
        if hidden is None or tuple(hidden.shape) != expected or hidden.dtype != torch.float32:
            found = "none" if hidden is None else f"{hidden.dtype} {list(hidden.shape)}"
            raise ValueError(
                f"hidden is {found}; a later stage needs the float32 {list(expected)} of the stage "
                "before"
            )
        # Layers add to the stream in place, and the sender may still hold it.
        return hidden.to(self.kernels.device, copy=True)


def _load_layer(checkpoint: Checkpoint, index: int, kernels: Kernels) -> LayerWeights:
    config = checkpoint.config
    prefix = f"model.layers.{index}"

    def packed(*names: str) -> PackedMatrix:
        parts = [checkpoint.tensor(f"{prefix}.{name}.weight") for name in names]
        return kernels.pack(parts[0] if len(parts) == 1 else torch.cat(parts))

    def vector(*names: str) -> Tensor:
        parts = [checkpoint.tensor(f"{prefix}.{name}") for name in names]
        return torch.cat(parts).to(kernels.device)

    qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return LayerWeights(
        input_norm=vector("input_layernorm.weight"),
        qkv=packed(*qkv),
        qkv_bias=vector(*(f"{name}.bias" for name in qkv)) if config.qkv_bias else None,
        q_norm=vector("self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=vector("self_attn.k_norm.weight") if config.qk_norm else None,
        output=packed("self_attn.o_proj"),
        output_bias=vector("self_attn.o_proj.bias") if config.output_bias else None,
        post_norm=vector("post_attention_layernorm.weight"),
        gate_up=packed(*gate_up),
        gate_up_bias=vector(*(f"{name}.bias" for name in gate_up)) if config.mlp_bias else None,
        down=packed("mlp.down_proj"),
        down_bias=vector("mlp.down_proj.bias") if config.mlp_bias else None,
        window=config.layer_windows[index],
    )


def _check_range(what: str, values: Tensor, limit: int) -> None:
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= limit):
        raise ValueError(
            f"a {what} of the step is {int(values.min())} or {int(values.max())}; it must be in "
            f"[0, {limit - 1}]"
        )
