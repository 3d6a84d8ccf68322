"""GGUF files against the same weights in safetensors, and dequantisation against the format."""

from __future__ import annotations

import contextlib
import math
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_writing import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_models import CASES, Pipeline, llama3_rope, prompt_of, tiny_model

from tokentight.kernels.interface import Kernels
from tokentight.models.checkpoint import expected_shapes, open_checkpoint
from tokentight.models.config import ModelConfig
from tokentight.models.errors import CheckpointError, UnsupportedModelError
from tokentight.models.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": ("llama", "Llama", {}),
    "llama-tied": ("llama", "Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("llama", "Mistral", {"sliding_window": 11, "head_dim": 32}),
    "qwen2": ("qwen2", "Qwen2", {"head_dim": 16}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_float32_gguf_equals_safetensors(
    tmp_path: Path, case: str, reference_kernels: Kernels
) -> None:
    """The same weights give the same tensors and the same bits of logits from either format, so
    Q and K of llama files were put back and those of Qwen left alone."""
    architecture, family, overrides = ARCHITECTURES[case]
    model = tiny_model(family, **overrides)
    model.save_pretrained(tmp_path / "hf")
    window = overrides.get("sliding_window")
    write_gguf(
        tmp_path / "model.gguf",
        model,
        architecture,
        metadata=lambda writer: writer.add_sliding_window(window) if window else None,
    )
    ours, theirs = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(tmp_path / "hf")
    assert ours.config.layer_windows == theirs.config.layer_windows
    for name in expected_shapes(theirs.config):
        assert torch.equal(ours.tensor(name), theirs.tensor(name)), name
    prompt = prompt_of(30)
    logits = [Pipeline.load(c, reference_kernels).logits(prompt) for c in (ours, theirs)]
    # The file keeps the epsilon of the norms in float32, so the last bits may differ.
    assert (logits[0] - logits[1]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_files_hold_the_rounded_weights(tmp_path: Path, kind: str) -> None:
    """Each tensor is the model's own, rounded as the format rounds: no row or head is misplaced."""
    model = tiny_model("Llama", tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", model, "llama", quantised=Kind[kind])
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config.checkpoint_dtype == {"F16": "float16", "BF16": "bfloat16"}.get(
        kind, kind
    )
    for name in expected_shapes(checkpoint.config):
        weight = model.state_dict()[name]
        if weight.dim() == 1:
            assert torch.equal(checkpoint.tensor(name), weight)
            continue
        rounded = {"F16": weight.half(), "BF16": weight.bfloat16()}.get(kind)
        if rounded is None:
            data = gguf.quants.quantize(weight.numpy(), Kind[kind])
            rounded = torch.from_numpy(gguf.quants.dequantize(data, Kind[kind]))
        actual = checkpoint.tensor(name)
        assert actual.dtype == (torch.bfloat16 if kind == "BF16" else torch.float32)
        assert torch.equal(actual.float(), rounded.float()), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_dequantisation_is_that_of_the_format(tmp_path: Path, kind: str) -> None:
    """Random blocks, decoded value by value as ggml's own C code states the format."""
    rng = np.random.default_rng(1)
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    model = tiny_model("Llama", hidden_size=256, num_hidden_layers=1, tie_word_embeddings=True)
    rows, columns = model.config.vocab_size, 256
    raw = rng.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    scales = SCALE_OFFSETS[kind]
    for row in raw:
        for start in range(0, len(row), size):
            for offset in scales:
                half = np.float16(rng.uniform(-0.1, 0.1)).tobytes()
                row[start + offset : start + offset + 2] = np.frombuffer(half, np.uint8)
    path = tmp_path / "m.gguf"
    write_gguf(
        path,
        model,
        "llama",
        leave_out=("model.embed_tokens.weight",),
        raw={"token_embd.weight": (raw, Kind[kind])},
    )
    actual = open_checkpoint(path).tensor("model.embed_tokens.weight").numpy()
    expected = np.array(
        [
            [
                v
                for b in range(0, len(row), size)
                for v in DECODERS[kind](row[b : b + size].tobytes())
            ]
            for row in raw[:6]
        ]
    )
    np.testing.assert_allclose(actual[:6], expected, rtol=3e-7, atol=1e-9)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "m.gguf"
    write_gguf(path, tiny_model("Llama", num_hidden_layers=1), "llama")
    return path


def half(data: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", data, at)[0])


def decode_q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * q for q in struct.unpack_from("32b", block, 2)]


def decode_q4_0(block: bytes) -> list[float]:
    low, high = [b & 15 for b in block[2:]], [b >> 4 for b in block[2:]]
    return [half(block, 0) * (q - 8) for q in low + high]


def decode_q4_1(block: bytes) -> list[float]:
    low, high = [b & 15 for b in block[4:]], [b >> 4 for b in block[4:]]
    return [half(block, 0) * q + half(block, 2) for q in low + high]


def decode_q4_k(block: bytes) -> list[float]:
    d, dmin, scales, quants = half(block, 0), half(block, 2), block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, minimum = scales[group] & 63, scales[group + 4] & 63
        else:
            scale = (scales[group + 4] & 15) | (scales[group - 4] >> 6) << 4
            minimum = (scales[group + 4] >> 4) | (scales[group] >> 6) << 4
        part = quants[group // 2 * 32 : group // 2 * 32 + 32]
        shift = 4 * (group % 2)
        values += [d * scale * ((b >> shift) & 15) - dmin * minimum for b in part]
    return values


def decode_q6_k(block: bytes) -> list[float]:
    low, high = block[:128], block[128:192]
    scales, d = struct.unpack_from("16b", block, 192), half(block, 208)
    values = [0.0] * 256
    for part in range(2):
        for index in range(32):
            h = high[part * 32 + index]
            a, b = low[part * 64 + index], low[part * 64 + index + 32]
            for quarter, q in enumerate((a & 15, b & 15, a >> 4, b >> 4)):
                signed = (q | ((h >> (2 * quarter)) & 3) << 4) - 32
                scale = scales[part * 8 + index // 16 + 2 * quarter]
                values[part * 128 + quarter * 32 + index] = d * scale * signed
    return values


DECODERS = {
    "Q8_0": decode_q8_0,
    "Q4_0": decode_q4_0,
    "Q4_1": decode_q4_1,
    "Q4_K": decode_q4_k,
    "Q6_K": decode_q6_k,
}
SCALE_OFFSETS = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}


def llama3_factors(head_dim: int) -> NDArray[np.float32]:
    """The factors that llama.cpp's converter writes for Llama 3.1's RoPE."""
    rope = llama3_rope()
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (
                rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
            ) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_rope_comes_as_a_tensor(tmp_path: Path, reference_kernels: Kernels) -> None:
    """Llama 3.1 files carry their RoPE scaling as rope_freqs.weight, and it is used."""
    model = tiny_model("Llama", rope_parameters=llama3_rope())
    write_gguf(tmp_path / "m.gguf", model, "llama", extra={"rope_freqs.weight": llama3_factors(16)})
    prompt = prompt_of(45)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    actual = Pipeline.load(open_checkpoint(tmp_path / "m.gguf"), reference_kernels).logits(prompt)
    assert (actual - expected).abs().max() < 2e-5


@pytest.mark.parametrize("case", ["llama-linear-rope", "llama-yarn-rope"])
def test_rope_scaling_from_metadata(tmp_path: Path, case: str, reference_kernels: Kernels) -> None:
    model = tiny_model("Llama", **CASES[case][1])
    rope = model.config.rope_parameters

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])

    write_gguf(tmp_path / "m.gguf", model, "llama", metadata=metadata)
    prompt = prompt_of(45)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    actual = Pipeline.load(open_checkpoint(tmp_path / "m.gguf"), reference_kernels).logits(prompt)
    assert (actual - expected).abs().max() < 2e-5


def test_metadata_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    """Our reader of the container against the package's own, over every kind of value."""

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("t.u8", 200)
        writer.add_int8("t.i8", -100)
        writer.add_uint16("t.u16", 60000)
        writer.add_int16("t.i16", -30000)
        writer.add_int32("t.i32", -(2**31))
        writer.add_uint64("t.u64", 2**63)
        writer.add_int64("t.i64", -(2**62))
        writer.add_float64("t.f64", 0.1)
        writer.add_bool("t.bool", True)
        writer.add_string("t.string", "héllo 世界")
        writer.add_array("t.strings", ["a", "", "世"])
        writer.add_array("t.floats", [0.5, -1.25])
        writer.add_array("t.bools", [True, False])

    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("Llama"), "llama", metadata=metadata)
    ours, theirs = GgufFile.open(path), gguf.GGUFReader(path)
    fields = {k: v.contents() for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.tensors[tensor.name].offset == tensor.data_offset


class TestErrors:
    """Every refusal names what was found and what is allowed."""

    def write(self, path: Path, architecture: str = "llama", **options: Any) -> Path:
        file = path / "m.gguf"
        write_gguf(file, tiny_model("Llama"), architecture, **options)
        return file

    def test_other_architectures(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "gemma3")
        with pytest.raises(UnsupportedModelError, match="'gemma3'; supported are llama, qwen2"):
            open_checkpoint(path)

    def test_other_quantisations(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, quantised=Kind.Q5_0)
        with pytest.raises(CheckpointError, match=r"stored as Q5_0; supported are F32, F16"):
            open_checkpoint(path)

    def test_missing_tensor(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, leave_out=("model.layers.1.mlp.up_proj.weight",))
        with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
            open_checkpoint(path)

    def test_tensor_without_a_place(self, tmp_path: Path) -> None:
        extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
        path = self.write(tmp_path, extra=extra)
        with pytest.raises(CheckpointError, match=r"no place for: blk\.0\.attn_sinks"):
            open_checkpoint(path)

    def test_experts_and_parts(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, metadata=lambda writer: writer.add_expert_count(8))
        with pytest.raises(UnsupportedModelError, match="mixture of experts"):
            open_checkpoint(path)
        path = self.write(tmp_path, metadata=lambda writer: writer.add_uint16("split.count", 3))
        with pytest.raises(UnsupportedModelError, match="one of 3 parts; join them"):
            open_checkpoint(path)

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("llama.attention.head_count", [4, 2, 4], "differs from layer to layer"),
            ("llama.block_count", "three", "is 'three'; it must be an integer"),
            ("llama.context_length", None, "does not state llama.context_length"),
            ("llama.attention.value_length", 8, "not as long as keys"),
            ("llama.rope.dimension_count", 8, "partial_rotary_factor is 0.5"),
            ("llama.rope.scaling.type", "longrope", "'longrope' is not supported"),
            ("llama.rope.scaling.attn_factor", 0.7, "uses attn_factor, which is not supported"),
            ("llama.rope.scaling.yarn_log_multiplier", 0.1, "uses yarn_log_multiplier"),
            ("llama.attention.layer_norm_rms_epsilon", float("nan"), "rms_norm_eps is nan"),
        ],
    )
    def test_metadata_that_is_not_served(
        self, tmp_path: Path, key: str, value: object, said: str
    ) -> None:
        file = GgufFile.open(self.write(tmp_path))
        metadata = {
            **file.metadata,
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.original_context_length": 32,
            key: value,
        }
        if value is None:
            del metadata[key]
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        with pytest.raises(UnsupportedModelError, match=re.escape(said)):
            ModelConfig.from_gguf(metadata, shapes)

    def test_old_linear_scaling(self, tmp_path: Path) -> None:
        path = self.write(
            tmp_path, metadata=lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0)
        )
        rope = open_checkpoint(path).config.rope
        assert (rope.rope_type, rope.factor) == ("linear", 4.0)

    @given(data=st.data())
    def test_damaged_heads_never_crash(self, small_gguf: Path, data: st.DataObject) -> None:
        """Bytes of the head overwritten at random: a checkpoint or a clear error, nothing else."""
        raw = bytearray(small_gguf.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, 1800))
            raw[at] = data.draw(st.integers(0, 255))
        path = small_gguf.with_name("damaged.gguf")
        path.write_bytes(raw)
        with contextlib.suppress(CheckpointError, UnsupportedModelError):
            open_checkpoint(path)

    def test_not_gguf(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(b"PK\x03\x04 something else")
        with pytest.raises(CheckpointError, match="not a GGUF file"):
            open_checkpoint(path)

    def test_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.touch()
        with pytest.raises(CheckpointError, match="not a GGUF file"):
            open_checkpoint(path)

    def test_version(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
        with pytest.raises(CheckpointError, match="is GGUF version 9; supported are 2, 3"):
            open_checkpoint(path)

    @pytest.mark.parametrize("kept", [20, 100, 700])
    def test_cut_short_in_its_head(self, tmp_path: Path, kept: int) -> None:
        path = self.write(tmp_path)
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(CheckpointError, match="cut short or damaged"):
            open_checkpoint(path)

    def test_cut_short_in_its_data(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(CheckpointError, match=r"is cut short: .* ends at byte"):
            open_checkpoint(path)

    def test_wrong_number_of_rope_factors(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, extra={"rope_freqs.weight": np.ones(3, np.float32)})
        with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight has 3 factors"):
            open_checkpoint(path)
