"""Safetensors directories: single, sharded, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_model

from tokentight.models.checkpoint import expected_shapes, open_checkpoint
from tokentight.models.errors import CheckpointError, UnsupportedModelError


def rewrite(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors in the one safetensors file, or take out those that map to None."""
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **change}
    kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("case", ["llama-biases", "qwen2-tied", "qwen3-biases-yarn"])
@pytest.mark.parametrize("shard", ["30KB", "1GB"])
def test_every_tensor_is_that_of_the_model(tmp_path: Path, case: str, shard: str) -> None:
    """Sharded or not, each name gives transformers' own parameter."""
    model = save_tiny(tmp_path, case, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "30KB")
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    names = set(expected_shapes(checkpoint.config))
    tied = {"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set()
    assert names == set(state) - tied
    for name in names:
        assert torch.equal(checkpoint.tensor(name), state[name])


@pytest.mark.parametrize("case", ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3"])
def test_parameters_are_counted_as_transformers_counts_them(tmp_path: Path, case: str) -> None:
    model = save_tiny(tmp_path, case)
    assert open_checkpoint(tmp_path).config.num_parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("stored", "asked", "in_memory"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(tmp_path: Path, stored: torch.dtype, asked: str, in_memory: torch.dtype) -> None:
    """Matrices stand as asked for, vectors in float32, and widening loses nothing."""
    model = tiny_model("Qwen3", stored)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path, asked)  # type: ignore[arg-type]
    matrix, vector = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    assert checkpoint.config.weight_dtype == in_memory
    assert checkpoint.tensor(matrix).dtype == in_memory
    assert torch.equal(checkpoint.tensor(matrix), model.state_dict()[matrix].to(in_memory))
    assert checkpoint.tensor(vector).dtype == torch.float32
    assert torch.equal(checkpoint.tensor(vector), model.state_dict()[vector].float())


def test_auto_widens_when_one_matrix_is_wider(tmp_path: Path) -> None:
    """One float32 matrix among bfloat16 ones must not be rounded unasked."""
    tiny_model("Llama", torch.bfloat16).save_pretrained(tmp_path)
    name = "model.layers.2.mlp.down_proj.weight"
    exact = torch.full((64, 96), 1.00001)
    rewrite(tmp_path, {name: exact})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.weight_dtype == torch.float32
    assert torch.equal(checkpoint.tensor(name), exact)


def test_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    """A tensor that was read stays what it was when the file is overwritten in place."""
    model = save_tiny(tmp_path, "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = open_checkpoint(tmp_path).tensor(name)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 8)
        stream.write(b"\xff" * (file.stat().st_size // 8 * 7))
    assert torch.equal(tensor, model.state_dict()[name])


class TestErrors:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        save_tiny(tmp_path, "llama")
        return tmp_path

    def test_no_such_path(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="does not exist"):
            open_checkpoint(tmp_path / "nothing")

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").touch()
        with pytest.raises(CheckpointError, match=r"neither a directory of safetensors"):
            open_checkpoint(tmp_path / "model.onnx")

    def test_unknown_dtype(self, directory: Path) -> None:
        with pytest.raises(CheckpointError, match="dtype is 'float16'; it must be auto, float32"):
            open_checkpoint(directory, "float16")  # type: ignore[arg-type]

    def test_empty_directory(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"holds no weights: neither model\.safetensors"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
    def test_pickles(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"\x80\x04.")
        with pytest.raises(CheckpointError, match=r"pickles only .* never read"):
            open_checkpoint(tmp_path)

    def test_several_files_without_index(self, directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        (directory / "b.safetensors").touch()
        with pytest.raises(CheckpointError, match="2 safetensors files and neither"):
            open_checkpoint(directory)

    def test_several_gguf_files(self, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=r"2 \.gguf files \(a\.gguf, b\.gguf\); name"):
            open_checkpoint(tmp_path)

    def test_missing_config(self, directory: Path) -> None:
        (directory / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"config\.json is missing"):
            open_checkpoint(directory)

    @pytest.mark.parametrize(("text", "said"), [("{", "not valid JSON"), ("[1]", "holds a list")])
    def test_malformed_config(self, directory: Path, text: str, said: str) -> None:
        (directory / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(directory)

    def test_missing_shard(self, tmp_path: Path) -> None:
        save_tiny(tmp_path, "llama", max_shard_size="30KB")
        shard = sorted(tmp_path.glob("*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(CheckpointError, match=rf"lacks 1 of \d+ shards: {shard.name}"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("weight_map", [{}, {"model.norm.weight": "../elsewhere.safetensors"}])
    def test_malformed_index(self, tmp_path: Path, weight_map: dict[str, str]) -> None:
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=r"has no weight_map|outside its directory"):
            open_checkpoint(tmp_path)

    def test_missing_tensor(self, directory: Path) -> None:
        rewrite(directory, {"model.layers.1.mlp.up_proj.weight": None})
        with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
            open_checkpoint(directory)

    def test_shape(self, directory: Path) -> None:
        rewrite(directory, {"model.layers.1.self_attn.k_proj.weight": torch.zeros(16, 64)})
        with pytest.raises(CheckpointError, match=r"shape \[16, 64\]; .* says \[32, 64\]"):
            open_checkpoint(directory)

    def test_tensor_without_a_place(self, directory: Path) -> None:
        rewrite(directory, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
        with pytest.raises(CheckpointError, match=r"no place for: .*q_proj\.bias"):
            open_checkpoint(directory)

    def test_buffers_that_are_computed_anew_are_fine(self, directory: Path) -> None:
        rewrite(directory, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
        open_checkpoint(directory)

    def test_stored_dtype(self, directory: Path) -> None:
        weight = torch.zeros(96, 64, dtype=torch.float8_e4m3fn)
        rewrite(directory, {"model.layers.1.mlp.up_proj.weight": weight})
        with pytest.raises(CheckpointError, match="stored as F8_E4M3; supported are F32, F16"):
            open_checkpoint(directory)

    def test_quantised_checkpoint(self, directory: Path) -> None:
        edit_config(directory, quantization_config={"quant_method": "gptq"})
        with pytest.raises(UnsupportedModelError, match="'gptq'; quantised safetensors"):
            open_checkpoint(directory)

    @pytest.mark.parametrize("lost", [1, 1000, -4, -60])
    def test_cut_short(self, directory: Path, lost: int) -> None:
        """In the data, or (negative) after so many bytes of the header."""
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-lost])
        with pytest.raises(CheckpointError, match="not a safetensors file, or is cut short"):
            open_checkpoint(directory)

    def test_unknown_tensor(self, directory: Path) -> None:
        with pytest.raises(CheckpointError, match="no tensor 'lm_tail'"):
            open_checkpoint(directory).tensor("lm_tail")
