"""A random tiny model on disk that can be served: weights, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tokentight.engine.config import EngineConfig

MAX_MODEL_LEN = 256
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_model(directory: Path) -> Path:
    vocab_size = _save_tokenizer(directory)
    _save_llama(directory, vocab_size)
    return directory


def tiny_engine_config(directory: Path, **settings: object) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        **{  # type: ignore[arg-type]
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "kv_cache_memory": 4 * 2**20,
            "num_threads": 1,
            **settings,
        },
    )


def _save_tokenizer(directory: Path) -> int:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return backend.get_vocab_size()


def _save_llama(directory: Path, vocab_size: int) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.12 * noise)
    model.save_pretrained(directory)
