"""Logprobs in the shapes callers know: completions', chat's, and vLLM's prompt logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from tokentight.server.engine_api import ServingTokenizer, TokenLogprobs


def token_name(tokenizer: ServingTokenizer, token_id: int) -> str:
    r"""A token as text; one that is not whole characters as OpenAI writes it: `bytes:\xe2\x82`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """The logprobs object of completions, filled as tokens come.

    `text_offset` counts characters of the choice's text. A token in the middle of a character has
    the offset of that character; a special token that is not shown has no width.
    """

    def __init__(
        self, tokenizer: ServingTokenizer, num_top: int, *, skip_special_tokens: bool, echo: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skip_special = skip_special_tokens
        # The first token of a sentencepiece text begins with a space that the text has not.
        self._drops_space = echo and not tokenizer.is_byte_level
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def start_output_at(self, offset: int) -> None:
        """The output's text begins `offset` characters into the choice's: behind its echo."""
        self._decoder.reset()
        self._drops_space = False
        self._offset = offset

    def add(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The next tokens, as an object of their own. An entry None has no logprob."""
        tokens, offsets = [], []
        for token_id in token_ids:
            tokens.append(token_name(self._tokenizer, token_id))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._shown_bytes(token_id)))
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _shown_bytes(self, token_id: int) -> bytes:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return b""
        raw = self._tokenizer.token_bytes(token_id)
        if self._drops_space:
            self._drops_space = False
            return raw.removeprefix(b" ")
        return raw

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely by name, and the token itself. Of two with one name, the likelier."""
        named: dict[str, float] = {}
        for token_id, logprob in (
            *entry.top[: self._num_top],
            (entry.token_id, entry.logprob),
        ):
            named.setdefault(token_name(self._tokenizer, token_id), logprob)
        return named


def chat_logprobs(
    tokenizer: ServingTokenizer, entries: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """The logprobs object of chat completions."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_name(tokenizer, token_id),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [
            {
                **one(entry.token_id, entry.logprob),
                "top_logprobs": [one(*candidate) for candidate in entry.top[:num_top]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(
    tokenizer: ServingTokenizer, entries: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: for each prompt token null, or {token id: {logprob, rank, decoded_token}}."""
    return [None if entry is None else _ranked(tokenizer, entry, num_top) for entry in entries]


def _ranked(
    tokenizer: ServingTokenizer, entry: TokenLogprobs, num_top: int
) -> dict[str, dict[str, Any]]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [
        (token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(entry.top[:num_top], start=1)
        if token_id != entry.token_id
    ]
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": token_name(tokenizer, token_id),
        }
        for token_id, logprob, rank in ranked
    }
