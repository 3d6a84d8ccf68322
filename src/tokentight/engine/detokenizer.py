"""From tokens to text as they come, without ever splitting or taking back a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class DetokenizerTokenizer(Protocol):
    """What detokenization needs to know of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `token_ids`; bytes that are no character become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for ids the vocabulary does not have."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` can be told to skip the token."""
        ...

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one byte of a byte-fallback vocabulary (`<0x41>`)."""
        ...


class IncrementalDetokenizer:
    """Text of one request's output, each piece final.

    All pieces together are what `decode` makes of the whole output where it stands after the
    prompt: the text keeps the leading space that `decode` drops at the very start of a text. The
    prompt does not complete a character of the output, nor the other way round.

    Text may be cut where `decode` carries nothing across:
    - not inside a character. Byte-level tokens may end in its middle; the bytes tell.
    - not inside a run of byte tokens. Byte-fallback decoders turn a run into text as a whole, and
      a bad byte late in it spoils the good ones before.
    Between two cuts a token is decoded once, and once more as the context of the next, so the work
    is linear in the number of tokens.
    """

    def __init__(
        self,
        tokenizer: DetokenizerTokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        for token_id in reversed(prompt_token_ids):
            if self._is_context(token_id):
                self._set_context(token_id)
                break

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that has become final with `token_ids`."""
        num_final = 0
        for token_id in token_ids:
            if not self._is_visible(token_id):
                continue
            self._pending.append(token_id)
            if self._ends_clean(token_id):
                num_final = len(self._pending)
        return self._emit(num_final)

    def finish(self) -> str:
        """The rest of the text; an unfinished character is shown as `decode` shows it."""
        self._utf8.reset()
        return self._emit(len(self._pending))

    def _is_visible(self, token_id: int) -> bool:
        """Whether `decode` lets its decoder see the token at all."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return False
        return self._tokenizer.token_bytes(token_id) != b""

    def _is_context(self, token_id: int) -> bool:
        """Whether the token decodes to a text of its own, whatever output follows it.

        One byte token in ASCII does: it is one character, be it spoilt or not. A space is left
        out, since a decoder that drops a leading one would drop it or not.
        """
        if not self._is_visible(token_id):
            return False
        raw = self._tokenizer.token_bytes(token_id)
        if self._tokenizer.is_byte_token(token_id):
            return raw.isascii() and raw != b" "
        self._utf8.reset()
        clean = self._ends_clean(token_id)
        self._utf8.reset()
        return clean

    def _ends_clean(self, token_id: int) -> bool:
        """Whether text may be cut behind the token, which follows those seen so far."""
        self._utf8.decode(self._tokenizer.token_bytes(token_id))
        unfinished, _ = self._utf8.getstate()
        return not unfinished and not self._tokenizer.is_byte_token(token_id)

    def _emit(self, num_tokens: int) -> str:
        if num_tokens == 0:
            return ""
        token_ids = self._pending[:num_tokens]
        del self._pending[:num_tokens]
        text = self._decode([*self._context, *token_ids])[len(self._context_text) :]
        self._set_context(token_ids[-1])
        return text

    def _set_context(self, token_id: int) -> None:
        self._context = [token_id]
        self._context_text = self._decode(self._context)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)
