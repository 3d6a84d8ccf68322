"""Text in pieces is the text of the whole, for any bytes and any split."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tokentight.engine.detokenizer import IncrementalDetokenizer


class Backend:
    """A `tokenizers` tokenizer, with its tokens' bytes told by the test and not derived."""

    def __init__(self, tokenizer: Tokenizer, bytes_of: dict[int, bytes], fallback: bool) -> None:
        self.tokenizer = tokenizer
        self.bytes_of = bytes_of
        self.fallback = fallback
        self.special = {
            i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.neutral = max(i for i, raw in bytes_of.items() if raw == b"A")
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.bytes_of.get(token_id, b"")

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special

    def is_byte_token(self, token_id: int) -> bool:
        return self.fallback and token_id < 256

    def is_text(self, token_id: int) -> bool:
        """Whether the token shows text by itself: no part of a character."""
        return not self.is_byte_token(token_id) or 0x20 != token_id < 0x80


EXTRA = ["€", "Tür", " Tür", " ", "  ", "\n", "👩‍👩‍👧", "日本", "a", ".", "\ufffd", "A"]


def add_tokens(tokenizer: Tokenizer, bytes_of: dict[int, bytes]) -> None:
    first = len(bytes_of)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    for offset, content in enumerate(["<|begin|>", "<|end|>", "<think>"]):
        assert tokenizer.token_to_id(content) == first + offset
        bytes_of[first + offset] = content.encode()


def byte_level() -> Backend:
    """GPT-2's kind: ids 0 to 255 are single bytes; some merges, also across characters."""
    alphabet = bytes_to_unicode()
    pieces = [text.encode() for text in EXTRA if len(text.encode()) > 1]
    pieces += [
        b"\xe2\x82",
        b"\x82\xac",
        b"\xac\xe2",
        b"a\xf0",
        b"\xf0\x9f",
        b"\x98\x80 ",
        b"\xff\xfe",
    ]
    bytes_of = dict(enumerate([bytes([b]) for b in range(256)] + pieces))
    vocab = {"".join(alphabet[b] for b in raw): i for i, raw in bytes_of.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens(tokenizer, bytes_of)
    return Backend(tokenizer, bytes_of, fallback=False)


def byte_fallback() -> Backend:
    """Llama 2's kind: `<0x00>` to `<0xFF>`, and pieces in which a space is `▁`."""
    bytes_of = dict(enumerate([bytes([b]) for b in range(256)] + [t.encode() for t in EXTRA]))
    names = [f"<0x{b:02X}>" for b in range(256)] + [t.replace(" ", "▁") for t in EXTRA]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    add_tokens(tokenizer, bytes_of)
    return Backend(tokenizer, bytes_of, fallback=True)


def metaspace() -> Backend:
    """Sentencepiece without bytes: the decoder drops the space before the first token."""
    pieces = [f" {t}" for t in ("a", "b", "€", "", "日本")] + ["c", "d", ".", "A"]
    bytes_of = {i: t.encode() for i, t in enumerate(pieces)}
    vocab = {t.replace(" ", "▁"): i for i, t in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    add_tokens(tokenizer, bytes_of)
    return Backend(tokenizer, bytes_of, fallback=False)


BACKENDS = {"byte_level": byte_level(), "byte_fallback": byte_fallback(), "metaspace": metaspace()}
UNKNOWN = 5000


def id_of(backend: Backend, content: str) -> int:
    return max(i for i, raw in backend.bytes_of.items() if raw == content.encode())


@st.composite
def token_ids(draw: st.DrawFn, backend: Backend) -> list[int]:
    """Tokens at random, and tokens of well-formed text byte by byte, one after the other."""
    ids: list[int] = []
    any_id = st.sampled_from([*backend.bytes_of, UNKNOWN])
    high = st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xC3, 0x41, 0x20, 0xED])
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(
            st.sampled_from(["any", "text", "bytes"] if backend.bytes_of.get(255) else ["any"])
        )
        if kind == "any":
            ids += draw(st.lists(any_id, max_size=5))
        elif kind == "text":
            ids += draw(st.text(max_size=4)).encode()
        else:
            ids += draw(st.lists(high, max_size=5))
    return ids


def whole_text(backend: Backend, prompt: list[int], output: list[int], skip: bool) -> str:
    """What `decode` makes of the output behind a prompt that shows any text, or behind none."""
    shown = [i for i in prompt if not (skip and backend.is_special(i))]
    if not any(backend.token_bytes(i) and backend.is_text(i) for i in shown):
        return backend.decode(output, skip)
    whole = backend.decode([backend.neutral, *output], skip)
    assert whole.startswith("A")
    return whole[1:]


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=150)
@given(st.data())
def test_any_tokens_in_any_split_equal_the_whole_decode(name: str, data: st.DataObject) -> None:
    backend = BACKENDS[name]
    prompt = data.draw(token_ids(backend), "prompt")
    output = data.draw(token_ids(backend), "output")
    skip = data.draw(st.booleans(), "skip_special_tokens")
    detokenizer = IncrementalDetokenizer(backend, prompt, skip)
    expected = whole_text(backend, prompt, output, skip)
    text = ""
    rest = output
    while rest:
        size = data.draw(st.integers(1, len(rest)), "piece")
        text += detokenizer.push(rest[:size])
        rest = rest[size:]
        assert expected.startswith(text), "text was shown that is not in the whole"
    text += detokenizer.finish()
    assert text == expected
    assert detokenizer.finish() == ""


@given(st.text(), st.text())
def test_text_is_shown_as_soon_as_its_characters_are_whole(prompt: str, text: str) -> None:
    """Byte-level tokens, one byte each: after every byte, all whole characters are out."""
    detokenizer = IncrementalDetokenizer(BACKENDS["byte_level"], list(prompt.encode()))
    raw = text.encode()
    shown = ""
    for end in range(1, len(raw) + 1):
        shown += detokenizer.push([raw[end - 1]])
        assert shown == raw[:end].decode("utf-8", "ignore")
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("name", "prompt", "output", "expected"),
    [
        ("byte_fallback", ["a"], [" Tür", " Tür"], " Tür Tür"),
        ("byte_fallback", ["<|begin|>"], [" Tür", " Tür"], "Tür Tür"),
        ("byte_fallback", ["a", "<|end|>"], [" Tür"], " Tür"),
        ("metaspace", ["c"], [" a", " b"], " a b"),
        ("metaspace", ["<|begin|>"], [" a", " b"], "a b"),
        ("byte_level", [], [" Tür", "<|end|>"], " Tür"),
    ],
)
def test_text_behind_a_prompt_keeps_its_space(
    name: str, prompt: list[str], output: list[str], expected: str
) -> None:
    backend = BACKENDS[name]
    detokenizer = IncrementalDetokenizer(backend, [id_of(backend, t) for t in prompt])
    text = "".join(detokenizer.push([id_of(backend, t)]) for t in output)
    assert text + detokenizer.finish() == expected


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_an_unfinished_character_is_shown_at_the_end_only(name: str) -> None:
    backend = BACKENDS[name]
    prompt = [id_of(backend, "Tür")]
    detokenizer = IncrementalDetokenizer(backend, prompt)
    assert detokenizer.push([0xE2]) == ""
    assert detokenizer.push([0x82]) == ""
    assert detokenizer.finish() == whole_text(backend, prompt, [0xE2, 0x82], True)
    assert "\ufffd" in whole_text(backend, prompt, [0xE2, 0x82], True)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("kind", ["text", "bad bytes", "replacement characters"])
def test_work_is_linear(name: str, kind: str) -> None:
    """Every token is decoded at most three times: itself, as context, and that context's text."""
    backend = BACKENDS[name]
    token = {"text": id_of(backend, "Tür"), "bad bytes": 0xFF}.get(kind, id_of(backend, "\ufffd"))
    detokenizer = IncrementalDetokenizer(backend, [])
    before = backend.num_decoded
    for _ in range(1000):
        detokenizer.push([token])
    detokenizer.finish()
    assert backend.num_decoded - before <= 3 * 1000 + 1


@given(st.lists(st.integers(0, 255), max_size=8))
@example([0x41, 0xFF])
@example([0xE2, 0x82, 0xAC])
def test_a_run_of_byte_tokens_becomes_text_as_a_whole(run: list[int]) -> None:
    """A bad byte late in a run spoils all of it, so nothing of it is shown before it ends."""
    backend = BACKENDS["byte_fallback"]
    tail = id_of(backend, "Tür")
    detokenizer = IncrementalDetokenizer(backend, [tail])
    assert all(detokenizer.push([byte]) == "" for byte in run)
    try:
        expected = bytes(run).decode()
    except UnicodeDecodeError:
        expected = "\ufffd" * len(run)
    assert detokenizer.push([tail]) == expected + "Tür"
