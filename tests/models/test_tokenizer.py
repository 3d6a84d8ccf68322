"""Tokenizers against transformers, the format's own rules, and themselves."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from tokentight.models.errors import ChatTemplateError, CheckpointError, UnsupportedModelError
from tokentight.models.gguf_tokenizer import tokenizer_from_gguf
from tokentight.models.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't panic: 1234 + 5678!",
    "def f(x):\n    return x ** 2  # squares\n\n\treturn None",
    "Größe, naïve café, 日本語 テキスト, 🙂 👩‍👩‍👧 emoji",
] * 3
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TEXTS = st.one_of(st.text(), st.text(alphabet="abThe '\n\t 12é世🙂<|>ims_endstar", max_size=60))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé <b>?"}]


@cache
def byte_level() -> Backend:
    """A byte-level BPE with Qwen 2's way of cutting text, trained here."""
    backend = Backend(BPE())
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return backend


@cache
def sentencepiece_metadata() -> dict[str, Any]:
    """A GGUF vocabulary as sentencepiece writes it: bytes, characters, then merged pieces whose
    score falls with their index."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        CORPUS[:2], trainers.BpeTrainer(vocab_size=160, show_progress=False)
    )
    learned = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    pieces = [piece for piece, _ in learned]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, "[INST]"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [float(-index) for index in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def gguf_metadata() -> dict[str, Any]:
    """The vocabulary of `byte_level` as a GGUF file carries it."""
    state = json.loads(byte_level().to_str())
    vocab = byte_level().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
    }


def of_metadata(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.of_backend(tokenizer_from_gguf(metadata), None, {})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`byte_level` as transformers saves it, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tokenizer")
    saved = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|im_end|>", bos_token="<|end|>"
    )
    saved.chat_template = TEMPLATE
    saved.save_pretrained(path)
    return path


def test_directory_equals_transformers(directory: Path) -> None:
    """Ids, text, chat prompt, end token: all as transformers has them from the same directory."""
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in [*CORPUS, "<|im_start|>user\nHi<|im_end|>", "", "  a  "]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)
    for add in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add)
        assert ours.apply_chat_template(MESSAGES, add) == expected


@given(TEXTS)
def test_gguf_and_directory_cut_text_alike(text: str) -> None:
    """The tokenizer rebuilt from a GGUF vocabulary gives the ids of the original; Qwen 2 brings
    text into NFC first, so the original gets it that way."""
    original = byte_level().encode(unicodedata.normalize("NFC", text)).ids
    assert of_gguf().encode(text) == original


@cache
def of_gguf() -> Tokenizer:
    return of_metadata(gguf_metadata())


@cache
def of_sentencepiece() -> Tokenizer:
    return of_metadata(sentencepiece_metadata())


@given(TEXTS)
def test_byte_level_tokens_join_to_the_text(text: str) -> None:
    """The bytes of the tokens, joined, are the text's own: not one is lost or doubled."""
    tokenizer = Tokenizer.of_backend(byte_level(), None, {})
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(st.text(alphabet="abThe '\n\t 12é世🙂▁", max_size=40))
def test_sentencepiece_tokens_join_to_the_text(text: str) -> None:
    """With sentencepiece's space before the text, and its own sign for a space read as one."""
    tokenizer = of_sentencepiece()
    ids = tokenizer.encode(text, add_special_tokens=False)
    plain = text.replace("▁", " ")
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined == (" " + plain if text else "").encode()
    assert tokenizer.decode(ids) == plain


@given(st.text(alphabet="abThe quickbrown. 12é世", min_size=1, max_size=30))
def test_sentencepiece_merges_best_scores_first(text: str) -> None:
    """Against sentencepiece's rule written out: join the neighbours whose piece scores highest,
    leftmost on ties, until none can be joined; characters without a piece become bytes."""
    metadata = sentencepiece_metadata()
    index = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[index[a + b]], at)
            for at, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in index
        ]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    expected = []
    for piece in pieces:
        whole = [index[piece]] if piece in index else None
        expected += whole or [index[f"<0x{byte:02X}>"] for byte in piece.encode()]
    assert of_sentencepiece().encode(text, add_special_tokens=False) == expected


def test_begin_token_follows_the_file() -> None:
    """sentencepiece vocabularies begin with <s> unless the file says no; Qwen's do not."""
    metadata = sentencepiece_metadata()
    plain = of_sentencepiece().encode("The", add_special_tokens=False)
    assert of_sentencepiece().encode("The") == [1, *plain]
    without = of_metadata({**metadata, "tokenizer.ggml.add_bos_token": False})
    assert without.encode("The") == plain
    both = of_metadata({**metadata, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("The") == [1, *plain, 2]
    assert of_gguf().encode("The") == of_gguf().encode("The", add_special_tokens=False)


def test_tokens_one_by_one() -> None:
    tokenizer = of_sentencepiece()
    inst = tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    assert tokenizer.token_text(3 + 0xE4) == "�"
    assert (tokenizer.is_special(1), tokenizer.is_special(inst)) == (True, False)
    assert tokenizer.token_text(inst) == "[INST]"
    assert inst in tokenizer.encode("a[INST]b")
    assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_byte_token(i)] == list(
        range(3, 3 + 256)
    )
    assert not any(map(of_gguf().is_byte_token, range(of_gguf().vocab_size)))
    assert not tokenizer.is_byte_level
    assert of_gguf().is_byte_level


def test_padding_ids_stand_for_nothing() -> None:
    """Models pad their vocabulary; an id past the tokenizer's own has no bytes and no text."""
    tokenizer = of_gguf()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""
    assert not tokenizer.is_special(tokenizer.vocab_size + 5)


def test_truncation_and_padding_in_the_file_are_turned_off(tmp_path: Path) -> None:
    """A tokenizer.json saved from training with a maximum length must not cut prompts."""
    backend = Backend.from_str(byte_level().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=500)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    text = CORPUS[0]
    assert Tokenizer.load(tmp_path).encode(text) == byte_level().encode(text).ids


def test_begin_token_of_a_directory(tmp_path: Path) -> None:
    """A begin token that tokenizer.json adds is added, unless asked not to."""
    backend = Backend.from_str(byte_level().to_str())
    begin = backend.token_to_id("<|end|>")
    backend.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", begin)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|end|>", "special": True}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a") == [begin, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.bos_token_id == begin


def test_gguf_file_with_its_template(tmp_path: Path) -> None:
    """Vocabulary, end token and chat template all come out of the one file, also when only its
    directory is named."""
    metadata = gguf_metadata()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for path in (tmp_path / "m.gguf", tmp_path):
        tokenizer = Tokenizer.load(path)
        assert tokenizer.eos_token_ids == (metadata["tokenizer.ggml.eos_token_id"],)
        assert tokenizer.encode(CORPUS[0]) == byte_level().encode(CORPUS[0]).ids
        prompt = tokenizer.apply_chat_template(MESSAGES)
        assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
        assert "Hé <b>?" in prompt


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "B"}}, "A"),
        ({"tokenizer_config.json": {"chat_template": "B"}}, "B"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        ({"chat_template.json": {"chat_template": "J"}}, "J"),
    ],
)
def test_where_templates_are_found(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert Tokenizer.load(tmp_path).apply_chat_template(MESSAGES) == expected


def templated(template: str) -> Tokenizer:
    return Tokenizer.of_backend(byte_level(), template, {"eos_token": "<|im_end|>"})


def test_what_templates_may_use() -> None:
    """What transformers gives templates: tools, variables, tojson unescaped, loop controls."""
    tokenizer = templated(
        "{% generation %}{{ tools | tojson }}{% endgeneration %}|{{ thinking }}|{{ eos_token }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}"
        "{% endfor %}"
    )
    text = tokenizer.apply_chat_template(
        MESSAGES, tools=[{"name": "<é>"}], variables={"thinking": "no"}
    )
    assert text == '[{"name": "<é>"}]|no|<|im_end|>system'


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['absent'] + 1 }}", "does not accept these messages"),
        ("{{ 1 // 0 }}", "does not accept these messages"),
        ("{% for %}", "does not accept these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_templates_that_fail_or_reach_out(template: str, said: str) -> None:
    """A refusal by the template, a mistake in it, and an attempt to leave the sandbox."""
    with pytest.raises(ChatTemplateError, match=said):
        templated(template).apply_chat_template(MESSAGES)


def test_no_template() -> None:
    tokenizer = Tokenizer.of_backend(byte_level(), None, {})
    with pytest.raises(ChatTemplateError, match=r"no chat template .* completions endpoint"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "t5"}, "is 't5'; supported are gpt2"),
        ({"tokenizer.ggml.pre": "viking"}, "is 'viking'; supported are default, gpt-2"),
    ],
)
def test_unknown_vocabularies(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        tokenizer_from_gguf({**gguf_metadata(), **changes})


def test_no_vocabulary() -> None:
    with pytest.raises(UnsupportedModelError, match="carries no vocabulary"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2"})


@pytest.mark.parametrize("content", [None, "{"])
def test_no_tokenizer_that_can_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"no tokenizer that can be read .* tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_loading_needs_neither_torch_nor_transformers(directory: Path) -> None:
    """The HTTP service's process stays light: neither is imported for a tokenizer.json."""
    code = (
        "import sys, pathlib; from tokentight.models.tokenizer import Tokenizer; "
        f"Tokenizer.load(pathlib.Path({str(directory)!r})).encode('a'); "
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
