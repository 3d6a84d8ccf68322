"""GGUF files written from transformers models, as llama.cpp's converter would."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match:
        return f"blk.{match[1]}.{NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{NAMES[stem]}.{kind}"


def interleaved(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of Q and K rows: for each head 0, half, 1, half + 1, ..."""
    head_dim = weight.shape[0] // num_heads
    half = head_dim // 2
    order = [
        head * head_dim + part * half + index
        for head in range(num_heads)
        for index in range(half)
        for part in (0, 1)
    ]
    return np.ascontiguousarray(weight[order])


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    *,
    quantised: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Callable[[gguf.GGUFWriter], None] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    raw: Mapping[str, tuple[NDArray[np.uint8], GGMLQuantizationType]] | None = None,
    leave_out: tuple[str, ...] = (),
) -> None:
    """Write `model` to `path`, its matrices as `quantised`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if metadata is not None:
        metadata(writer)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name in leave_out:
            continue
        data = parameter.detach().to(torch.float32).numpy()
        if architecture == "llama" and ".q_proj." in name:
            data = interleaved(data, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            data = interleaved(data, config.num_key_value_heads)
        kind = quantised if data.ndim > 1 else GGMLQuantizationType.F32
        if kind == GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), data)
        elif kind == GGMLQuantizationType.F16:
            writer.add_tensor(gguf_name(name), data.astype(np.float16))
        else:
            packed = gguf.quants.quantize(data, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    for name, (blocks, kind) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
