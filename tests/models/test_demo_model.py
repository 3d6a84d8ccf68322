"""The demo model itself, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import BLOCK_SIZE, step_of

from tokentight.kernels.select import load_kernels
from tokentight.models.checkpoint import open_checkpoint
from tokentight.models.decoder import DecoderStage
from tokentight.models.demo_model import demo_model_path
from tokentight.models.partition import whole_model
from tokentight.models.tokenizer import Tokenizer

NUM_TOKENS = 32


@pytest.fixture(scope="module")
def path() -> Path:
    return demo_model_path()


def test_greedy_text_equals_that_of_transformers(path: Path) -> None:
    """The same question, the same 32 greedy tokens, and logits of the prompt within 5e-4 of
    transformers' (measured: 1e-4, on logits up to 36)."""
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.load(path)
    messages = [{"role": "user", "content": "What is the capital of France? Say one more thing."}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    oracle = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        expected_logits = oracle(torch.tensor([prompt])).logits[0]
        expected = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()

    checkpoint = open_checkpoint(path)
    stage = DecoderStage.load(
        checkpoint, whole_model(checkpoint.config), load_kernels("native", 1), 256
    )
    num_blocks = 256 // BLOCK_SIZE
    stage.allocate_kv(num_blocks, BLOCK_SIZE)
    blocks = list(range(num_blocks))
    logits = stage.logits(stage.forward(step_of(prompt, 0, blocks)))
    assert (logits - expected_logits).abs().max() < 5e-4
    generated: list[int] = []
    while len(generated) < NUM_TOKENS:
        generated.append(int(logits[-1].argmax()))
        step = step_of(generated[-1:], len(prompt) + len(generated) - 1, blocks)
        logits = stage.logits(stage.forward(step))
    assert generated == expected
    assert "Paris" in tokenizer.decode(generated)


@pytest.mark.slow
def test_tokenizer_equals_that_of_transformers(path: Path) -> None:
    """transformers rebuilds the same vocabulary (in 20 s); ids and chat prompts are the same."""
    from transformers import AutoTokenizer

    ours = Tokenizer.load(path)
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in [
        "1234567 apples   and\n\n\tpears",
        "def f(x):\n    return x**2 # ok",
        "naïve café — 日本語テスト 🙂🙃",
        "<|im_start|>x<|im_end|> y",
        "I'll don't WE'VE  ",
    ]:
        assert ours.encode(text) == theirs(text).input_ids
        assert b"".join(map(ours.token_bytes, ours.encode(text))).decode() == text
    messages = [{"role": "user", "content": "Hello"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == expected
    assert ours.eos_token_ids == (theirs.eos_token_id,)
