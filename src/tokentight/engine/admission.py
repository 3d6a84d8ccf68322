"""Which requests can be served at all; the rest are told why before anything is queued."""

from __future__ import annotations

from dataclasses import dataclass

from tokentight.engine.errors import RequestError
from tokentight.engine.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Admission:
    """The model's limits on a request."""

    vocab_size: int
    max_model_len: int

    def max_num_tokens(self, asked: GenerationRequest) -> int:
        """How many tokens, prompt and output, the request may come to.

        Raises:
            RequestError: naming the parameter, its value and what is allowed.
        """
        prompt, params = asked.prompt_token_ids, asked.params
        if not prompt:
            raise RequestError("prompt", "prompt is empty; at least one token is needed")
        self._check_vocabulary("prompt", prompt)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("logit_bias", tuple(params.logit_bias))
        limit = self.max_model_len
        if len(prompt) > limit:
            raise RequestError(
                "prompt",
                f"the prompt has {len(prompt)} tokens; the context length is {limit}",
            )
        if params.max_tokens is None:
            if len(prompt) == limit:
                raise RequestError(
                    "prompt",
                    f"the prompt has {len(prompt)} tokens and leaves no room for an answer; the "
                    f"context length is {limit}",
                )
            return limit
        if len(prompt) + params.max_tokens > limit:
            raise RequestError(
                "max_tokens",
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}, "
                f"together {len(prompt) + params.max_tokens}; the context length is {limit}",
            )
        return len(prompt) + params.max_tokens

    def _check_vocabulary(self, param: str, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    param,
                    f"{param} holds token id {token_id}; the vocabulary has ids 0 to "
                    f"{self.vocab_size - 1}",
                )
