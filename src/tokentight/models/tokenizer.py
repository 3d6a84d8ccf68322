"""Text to token ids and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentight.models.chat_template import ChatTemplate
from tokentight.models.errors import ChatTemplateError, CheckpointError
from tokentight.models.model_directory import only_gguf, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_SPACE = "▁"


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers` backend with the chat template and the end tokens that belong to it.

    `eos_token_ids` is the tokenizer's own end token; a model's configuration may name more.
    """

    backend: Backend
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: ChatTemplate | None
    vocab_size: int
    _added: Mapping[int, tuple[str, bool]] = field(repr=False)
    _byte_level: bool

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load from a Hugging Face directory, or from the vocabulary inside a `.gguf` file.

        Code that a model brings along is never run.

        Raises:
            CheckpointError: when there is no tokenizer, or it cannot be read.
            UnsupportedModelError: when it is of a kind that is not known.
        """
        if not path.is_dir():
            return _from_gguf(path)
        gguf_file = only_gguf(path)
        return _from_directory(path) if gguf_file is None else _from_gguf(gguf_file)

    @classmethod
    def of_backend(
        cls, backend: Backend, template: str | None, special_tokens: Mapping[str, str]
    ) -> Tokenizer:
        """Wrap a backend. `special_tokens` maps `bos_token`, `eos_token`, ... to their texts."""
        eos, bos = (special_tokens.get(f"{name}_token") for name in ("eos", "bos"))
        eos_id = backend.token_to_id(eos) if eos is not None else None
        # A file may ask for these; they would cut or lengthen prompts behind the caller's back.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        return cls(
            backend=backend,
            eos_token_ids=() if eos_id is None else (eos_id,),
            bos_token_id=backend.token_to_id(bos) if bos is not None else None,
            chat_template=None if template is None else ChatTemplate(template, special_tokens),
            vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
            _added={index: (token.content, token.special) for index, token in added.items()},
            _byte_level=_is_byte_level(backend),
        )

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens stand for bytes (GPT-2's way), rather than sentencepiece's characters."""
        return self._byte_level

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`; with the begin token where the model wants one."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not whole characters become U+FFFD."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. Encode it with `add_special_tokens=False`: templates write
        their own begin token.

        Raises:
            ChatTemplateError: when the model has no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "the model has no chat template (it is a base model, or its tokenizer_config.json "
                "lacks one); send a text prompt to the completions endpoint instead"
            )
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token (begin, end, roles), not text."""
        return self._added.get(token_id, ("", False))[1]

    def token_text(self, token_id: int) -> str:
        """The token as text of its own; bytes that are not whole characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, so that those of a sequence join to its text.

        Ids that the vocabulary does not have (models pad theirs) stand for nothing. A
        sentencepiece text drops the one space that its first token begins with; the bytes keep it.
        """
        if token_id in self._added:
            return self._added[token_id][0].encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _bytes_of_byte_level(token)
        if _is_byte_fallback(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(_SPACE, " ").encode()

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one byte of a byte-fallback vocabulary, such as `<0x41>`.

        Decoders turn a run of these into text as a whole.
        """
        if self._byte_level or token_id in self._added:
            return False
        token = self.backend.id_to_token(token_id)
        return token is not None and _is_byte_fallback(token)


def _from_gguf(path: Path) -> Tokenizer:
    from tokentight.models.gguf_file import GgufFile
    from tokentight.models.gguf_tokenizer import tokenizer_from_gguf

    metadata = GgufFile.open(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[name] = tokens[token_id]
    backend = tokenizer_from_gguf(metadata)
    return Tokenizer.of_backend(backend, metadata.get("tokenizer.chat_template"), special)


def _from_directory(directory: Path) -> Tokenizer:
    settings = read_json(directory / "tokenizer_config.json", required=False)
    special = read_json(directory / "special_tokens_map.json", required=False)
    texts = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name) or special.get(name)
        if value is not None:
            texts[name] = value["content"] if isinstance(value, dict) else str(value)
    template = _chat_template(directory, settings)
    return Tokenizer.of_backend(_backend(directory), template, texts)


def _backend(directory: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    file = directory / "tokenizer.json"
    try:
        if file.exists():
            return Backend.from_file(str(file))
        # Rarer forms (sentencepiece, vocab.json) are converted by transformers.
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        backend: Backend = converted.backend_tokenizer
    except Exception as error:  # the backends raise bare Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{directory} holds no tokenizer that can be read ({reason}); it needs a tokenizer.json"
        ) from error
    return backend


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = read_json(directory / "chat_template.json", required=False).get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _is_byte_level(backend: Backend) -> bool:
    # The state is the decoder's JSON; writing out the whole backend would cost its vocabulary too.
    return backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()


def _is_byte_fallback(token: str) -> bool:
    return re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token) is not None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(rest)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _bytes_of_byte_level(token: str) -> bytes:
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()
