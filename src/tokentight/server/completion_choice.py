"""One choice of a completion, from engine outputs to the parts that callers see.

A streamed response sends the parts, a whole one joins them: so both have the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokentight.server.engine_api import RequestOutput, ServingTokenizer
from tokentight.server.logprobs import CompletionLogprobs, prompt_logprobs
from tokentight.server.prompts import Prompt
from tokentight.server.protocol import CompletionRequest


class CompletionChoice:
    """Turns the outputs of choice `index` into parts. The first part carries the prompt's."""

    def __init__(
        self, tokenizer: ServingTokenizer, body: CompletionRequest, index: int, prompt: Prompt
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._index = index
        self._prompt = prompt
        self._skip_special = body.skip_special_tokens is not False
        self._logprobs = (
            None
            if body.logprobs is None
            else CompletionLogprobs(
                tokenizer,
                body.logprobs,
                skip_special_tokens=self._skip_special,
                echo=bool(body.echo),
            )
        )
        self._is_first = True

    def add(self, output: RequestOutput) -> dict[str, Any]:
        part: dict[str, Any] = {
            "index": self._index,
            "text": output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason and output.finish_reason.value,
            "stop_reason": output.stop_reason,
        }
        echoed = self._first(part, output) if self._is_first else None
        self._is_first = False
        if self._logprobs is not None:
            made = self._logprobs.add(output.token_ids, output.logprobs or ())
            part["logprobs"] = made if echoed is None else _appended(echoed, made)
        if self._body.return_token_ids:
            part["token_ids"] = list(output.token_ids)
        return part

    def _first(self, part: dict[str, Any], output: RequestOutput) -> dict[str, list[Any]] | None:
        """Add what comes once, and return the logprobs of an echoed prompt."""
        token_ids = self._prompt.token_ids
        if self._body.return_token_ids:
            part["prompt_token_ids"] = list(token_ids)
        entries = output.prompt_logprobs
        if self._body.prompt_logprobs is not None and entries is not None:
            part["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, entries, self._body.prompt_logprobs
            )
        if not self._body.echo:
            return None
        text = self._prompt.text
        if text is None:
            text = self._tokenizer.decode(token_ids, self._skip_special)
        part["text"] = text + part["text"]
        if self._logprobs is None or entries is None:
            return None
        echoed = self._logprobs.add(token_ids, entries)
        self._logprobs.start_output_at(len(text))
        return echoed


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The parts of one choice as one."""
    whole = {**parts[0], **{key: parts[-1][key] for key in ("finish_reason", "stop_reason")}}
    whole["text"] = "".join(part["text"] for part in parts)
    for part in parts[1:]:
        if whole["logprobs"] is not None:
            whole["logprobs"] = _appended(whole["logprobs"], part["logprobs"])
        if "token_ids" in whole:
            whole["token_ids"] += part["token_ids"]
    return whole


def _appended(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> dict[str, list[Any]]:
    for name, values in other.items():
        one[name] += values
    return one
