"""The demo model itself, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_writing import gguf_name
from tiny_models import BLOCK_SIZE, step_of

from tokentight.kernels.select import load_kernels
from tokentight.models.checkpoint import open_checkpoint
from tokentight.models.decoder import DecoderStage
from tokentight.models.demo_model import demo_model_path
from tokentight.models.partition import whole_model
from tokentight.models.tokenizer import Tokenizer

NUM_TOKENS = 32
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def path() -> Path:
    return demo_model_path()


def oracle_of(path: Path) -> Any:
    """transformers' model on the file's weights, which the `gguf` package's own reader reads.

    Built by hand, since transformers needs most of a minute to open a GGUF file.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {
        tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }
    state = {}
    for name in model.state_dict():
        weight = weights[gguf_name(name if name != "lm_head.weight" else EMBEDDING)]
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        if heads is not None:
            # llama.cpp interleaves the halves of each head: even rows are the first half.
            halves = weight.reshape(heads, 64, 576)
            weight = torch.cat([halves[:, 0::2], halves[:, 1::2]], dim=1).reshape(-1, 576)
        state[name] = weight.contiguous()
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    # What "meta" left without values: the RoPE frequencies are not part of the state.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_greedy_text_equals_that_of_transformers(path: Path) -> None:
    """The same question, the same 32 greedy tokens, and logits of the prompt within 5e-4 of
    transformers' (measured: 1e-4, on logits up to 36)."""
    tokenizer = Tokenizer.load(path)
    messages = [{"role": "user", "content": "What is the capital of France? Say one more thing."}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    oracle = oracle_of(path)
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
