"""Token counts of a response, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from tokentight.server.engine_api import RequestOutput


class Usage:
    """Counts of one HTTP request. A prompt counts once, however many choices it has."""

    def __init__(self, num_prompt_tokens: int, num_choices_per_prompt: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._n = num_choices_per_prompt
        self._num_completion_tokens = 0
        self._num_cached: dict[int, int] = {}

    def add(self, index: int, output: RequestOutput) -> None:
        self._num_completion_tokens += len(output.token_ids)
        if index % self._n == 0:  # later choices find their prompt cached by the first
            self._num_cached[index] = output.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }
