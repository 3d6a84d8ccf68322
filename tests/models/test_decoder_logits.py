"""The decoder against transformers on the same random weights, and against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import (
    BLOCK_SIZE,
    CASES,
    MAX_POSITIONS,
    NUM_BLOCKS,
    Pipeline,
    prompt_of,
    save_tiny,
    step_of,
    tiny_model,
)

from tokentight.kernels.interface import Kernels
from tokentight.models.checkpoint import open_checkpoint
from tokentight.models.decoder import DecoderStage
from tokentight.models.partition import LayerRange, split_layers

# Largest difference seen over all cases and both kernels is 5.4e-6, on logits up to 4.3.
TOLERANCE = 2e-5
PROMPT = prompt_of(45)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, case: str, kernels: Kernels) -> None:
    """Every position's logits are transformers' within `TOLERANCE`, prompt longer than windows."""
    model = save_tiny(tmp_path, case)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    actual = Pipeline.load(open_checkpoint(tmp_path), kernels).logits(PROMPT)
    difference = (actual - expected).abs().max().item()
    assert expected.abs().max() > 1
    assert difference < TOLERANCE, f"logits differ by {difference}"


@pytest.mark.parametrize("case", ["llama-tied", "mistral-window", "qwen2", "qwen3-biases-yarn"])
def test_bits_do_not_depend_on_chunks_or_stages(
    tmp_path: Path, case: str, kernels: Kernels
) -> None:
    """Chunked prefill, decode token by token, and 1, 2 or 3 stages all give the same bits."""
    save_tiny(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    expected = Pipeline.load(checkpoint, kernels).logits(PROMPT)
    for num_stages, chunk in ((1, 7), (2, 1), (3, 45), (3, 19)):
        pipeline = Pipeline.load(checkpoint, kernels, num_stages)
        assert torch.equal(pipeline.logits(PROMPT, chunk), expected), (num_stages, chunk)


def test_prefill_then_decode_equals_one_prefill(tmp_path: Path, kernels: Kernels) -> None:
    """Rows of a chunked prefill and a later decode in one step equal those computed alone."""
    save_tiny(tmp_path, "qwen3")
    pipeline = Pipeline.load(open_checkpoint(tmp_path), kernels)
    expected = pipeline.logits(PROMPT)
    first = pipeline.logits(PROMPT[:30], chunk=13)
    assert torch.equal(first, expected[:30])
    for at in range(30, len(PROMPT)):
        step = step_of([PROMPT[at]], at, pipeline.blocks)
        [stage] = pipeline.stages
        assert torch.equal(stage.logits(stage.forward(step))[0], expected[at])


def test_bfloat16_weights_stay_and_are_widened_exactly(tmp_path: Path, kernels: Kernels) -> None:
    """A bfloat16 checkpoint stays bfloat16 in memory; its logits are those of float32 arithmetic
    on the same values."""
    model = tiny_model("Qwen3", torch.bfloat16, head_dim=32)
    model.save_pretrained(tmp_path)
    # Loaded anew: .to(bfloat16) rounds transformers' RoPE frequencies too.
    oracle = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    kept, widened = open_checkpoint(tmp_path), open_checkpoint(tmp_path, "float32")
    assert kept.config.weight_dtype == torch.bfloat16
    assert widened.config.weight_dtype == torch.float32
    pipelines = [Pipeline.load(checkpoint, kernels) for checkpoint in (kept, widened)]
    logits = [pipeline.logits(PROMPT) for pipeline in pipelines]
    assert (logits[0] - expected).abs().max() < TOLERANCE
    assert torch.equal(*logits)
    nbytes = [pipeline.stages[0].weights[0].qkv.nbytes for pipeline in pipelines]
    assert nbytes[0] * 2 == nbytes[1]


def test_tied_head_shares_the_embedding_on_one_stage(
    tmp_path: Path, reference_kernels: Kernels
) -> None:
    save_tiny(tmp_path, "llama-tied")
    checkpoint = open_checkpoint(tmp_path)
    [one] = Pipeline.load(checkpoint, reference_kernels).stages
    assert one.head is one.embedding
    first, last = Pipeline.load(checkpoint, reference_kernels, 2).stages
    assert first.head is None
    assert last.embedding is None
    assert last.head is not None


def test_a_stage_reads_its_own_tensors_alone(tmp_path: Path, reference_kernels: Kernels) -> None:
    """The second stage of two never reads a tensor of the first, and reports its progress."""
    save_tiny(tmp_path, "llama")
    checkpoint = open_checkpoint(tmp_path)

    class Recorder:
        config = checkpoint.config
        read: list[str] = []  # noqa: RUF012

        def tensor(self, name: str) -> torch.Tensor:
            self.read.append(name)
            return checkpoint.tensor(name)

    _, last = split_layers(checkpoint.config, 2)
    progress: list[tuple[int, int]] = []
    DecoderStage.load(
        Recorder(), last, reference_kernels, 8, lambda done, total: progress.append((done, total))
    )
    allowed = tuple(f"model.layers.{index}." for index in range(last.first, last.last))
    assert all(name.startswith((*allowed, "model.norm", "lm_head")) for name in Recorder.read)
    total = last.num_layers + 1
    assert progress == [(done, total) for done in range(1, total + 1)]


def test_forward_leaves_the_hidden_states_it_was_given_alone(
    tmp_path: Path, reference_kernels: Kernels
) -> None:
    save_tiny(tmp_path, "llama")
    _, last = Pipeline.load(open_checkpoint(tmp_path), reference_kernels, 2).stages
    hidden = torch.ones(2, 64)
    last.forward(step_of([5, 6], 0, [1]), hidden)
    assert torch.equal(hidden, torch.ones(2, 64))


class TestMisuse:
    @pytest.fixture
    def stages(self, tmp_path: Path, reference_kernels: Kernels) -> list[DecoderStage]:
        save_tiny(tmp_path, "llama")
        return Pipeline.load(open_checkpoint(tmp_path), reference_kernels, 2).stages

    def test_kv_must_be_allocated(self, tmp_path: Path, reference_kernels: Kernels) -> None:
        save_tiny(tmp_path, "llama")
        checkpoint = open_checkpoint(tmp_path)
        whole = LayerRange(0, 3, has_embedding=True, has_head=True)
        stage = DecoderStage.load(checkpoint, whole, reference_kernels, 8)
        with pytest.raises(ValueError, match="allocate_kv must be called"):
            stage.forward(step_of([1], 0, [1]))

    def test_first_stage_takes_no_hidden_states(self, stages: list[DecoderStage]) -> None:
        with pytest.raises(ValueError, match="hidden must be None"):
            stages[0].forward(step_of([1], 0, [1]), torch.zeros(1, 64))

    @pytest.mark.parametrize("hidden", [None, torch.zeros(2, 64), torch.zeros(1, 64).double()])
    def test_later_stage_checks_hidden_states(
        self, stages: list[DecoderStage], hidden: torch.Tensor | None
    ) -> None:
        with pytest.raises(ValueError, match=r"a later stage needs the float32 \[1, 64\]"):
            stages[1].forward(step_of([1], 0, [1]), hidden)

    @pytest.mark.parametrize("token_id", [-1, 160])
    def test_token_outside_the_vocabulary(self, stages: list[DecoderStage], token_id: int) -> None:
        with pytest.raises(ValueError, match=rf"token id .* {token_id}.*\[0, 159\]"):
            stages[0].forward(step_of([token_id], 0, [1]))

    def test_position_outside_the_table(self, stages: list[DecoderStage]) -> None:
        blocks = list(range(MAX_POSITIONS // BLOCK_SIZE + 1))
        with pytest.raises(ValueError, match=r"position of the step is 64"):
            stages[0].forward(step_of([1], MAX_POSITIONS, blocks))

    def test_only_the_last_stage_has_logits(self, stages: list[DecoderStage]) -> None:
        with pytest.raises(ValueError, match="only the last stage"):
            stages[0].logits(torch.zeros(1, 64))

    def test_kv_bytes_are_those_of_the_configuration(self, stages: list[DecoderStage]) -> None:
        for stage in stages:
            per_token = stage.config.kv_bytes_per_token(stage.layers)
            assert stage.kv_bytes == per_token * NUM_BLOCKS * BLOCK_SIZE
