"""Tokenizers from the vocabulary a GGUF file carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from tokentight.models.errors import UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4

# How text is cut before merging, by the name llama.cpp gives it (`tokenizer.ggml.pre`).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that the metadata describes.

    Raises:
        UnsupportedModelError: for kinds of vocabulary that are not known, naming the known ones.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise UnsupportedModelError("the GGUF file carries no vocabulary (tokenizer.ggml.tokens)")
    if kind == "gpt2":
        tokenizer, bos_by_default = _byte_level(metadata)
    elif kind == "llama":
        tokenizer, bos_by_default = _sentencepiece(metadata), True
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model of the GGUF file is {kind!r}; supported are gpt2 (byte-level "
            "BPE) and llama (sentencepiece BPE)"
        )
    _add_added_tokens(tokenizer, metadata)
    _add_begin_and_end(tokenizer, metadata, bos_by_default)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre of the GGUF file is {pre!r}; supported are {', '.join(_SPLITS)}"
        )
    merges = [
        (left, right)
        for left, _, right in (m.partition(" ") for m in metadata.get("tokenizer.ggml.merges", ()))
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 and tekken take a whole word that is a token as it is, whatever the merges say.
    whole_words = pre in _BOS_BY_DEFAULT
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=whole_words))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in _BOS_BY_DEFAULT


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, metadata["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if prefix else steps
    )
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges a sentencepiece vocabulary implies: every way to make a token of two others,
    tokens of the highest score first."""
    merges = []
    for token, index in vocab.items():
        for at in range(1, len(token)):
            left, right = vocab.get(token[:at]), vocab.get(token[at:])
            if left is not None and right is not None:
                merges.append((-scores[index], left, right, token[:at], token[at:]))
    merges.sort()
    return [(left, right) for _, _, _, left, right in merges]


def _add_added_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Tokens that are found whole in text: control tokens, and those added by the author."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    pairs = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in pairs if kind == _USER_DEFINED]
    )


def _add_begin_and_end(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], bos_by_default: bool
) -> None:
    parts, special = ["$A"], []
    for name, flag, default in (
        ("bos", "add_bos_token", bos_by_default),
        ("eos", "add_eos_token", False),
    ):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None or not metadata.get(f"tokenizer.ggml.{flag}", default):
            continue
        token = metadata["tokenizer.ggml.tokens"][token_id]
        parts = [token, *parts] if name == "bos" else [*parts, token]
        special.append((token, token_id))
    if special:
        tokenizer.post_processor = TemplateProcessing(single=parts, special_tokens=special)
