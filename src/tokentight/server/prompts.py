"""From what a caller sent to token ids and sampling parameters the engine takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokentight.sampling.params import MAX_LOGIT_BIAS, SamplingParams, SamplingParamsError
from tokentight.server.engine_api import EngineInfo, ServingTokenizer
from tokentight.server.errors import bad_request, engine_error, shown
from tokentight.server.protocol import ChatCompletionRequest, GenerationBody, TokenizeRequest

INLINE_CHARS = 4096
"""Longer texts are tokenised in a thread, so that the other requests' tokens keep flowing."""

_DIRECT = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and its text where the caller gave text."""

    token_ids: tuple[int, ...]
    text: str | None


async def tokenize(tokenizer: ServingTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


async def text_or_ids(
    tokenizer: ServingTokenizer, prompt: str | list[int], add_special_tokens: bool
) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(tuple(await tokenize(tokenizer, prompt, add_special_tokens)), prompt)
    return Prompt(tuple(prompt), None)


async def chat_prompt(
    tokenizer: ServingTokenizer, body: ChatCompletionRequest | TokenizeRequest
) -> Prompt:
    """The messages as the model's chat template writes them.

    Raises:
        ApiError: 400 when there is no template, or it refuses the messages.
    """
    try:
        text = tokenizer.apply_chat_template(
            [message.as_template_input() for message in body.messages or ()],
            body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
        )
    except ValueError as error:
        raise bad_request("messages", str(error)) from error
    # The template has written the special tokens itself.
    return Prompt(tuple(await tokenize(tokenizer, text, add_special_tokens=False)), None)


def check_token_ids(param: str, token_ids: Sequence[int], info: EngineInfo) -> None:
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < info.vocab_size:
            raise bad_request(
                param,
                f"{param} holds token id {shown(token_id)} at position {position}; this model's "
                f"token ids are 0 to {info.vocab_size - 1}",
            )


def check_length(
    param: str, prompt: Prompt, max_tokens: int | None, info: EngineInfo, max_tokens_param: str
) -> None:
    """Refuse a prompt that leaves too little of the context length, naming the lengths."""
    length, limit = len(prompt.token_ids), info.max_model_len
    if length == 0:
        raise bad_request(param, f"{param} has no tokens; a prompt needs at least one")
    if length > limit or (max_tokens != 0 and length == limit):
        raise bad_request(
            param,
            f"{param} has {length} tokens, and this model's context length is {limit} tokens, "
            "prompt and output together; shorten the prompt",
            code="context_length_exceeded",
        )
    if max_tokens is not None and length + max_tokens > limit:
        raise bad_request(
            max_tokens_param,
            f"{param} has {length} tokens and {max_tokens_param} is {shown(max_tokens)}: together "
            f"more than this model's context length of {limit} tokens; lower {max_tokens_param} "
            f"to at most {limit - length}, or shorten the prompt",
            code="context_length_exceeded",
        )


def sampling_params(
    body: GenerationBody,
    info: EngineInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The body's sampling fields, defaults where it has none.

    Raises:
        ApiError: 400, naming the field, its value and what is allowed.
    """
    given: dict[str, Any] = {
        name: value for name in _DIRECT if (value := getattr(body, name)) is not None
    }
    if body.top_k is not None:
        given["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM's word for "off" is -1
    if body.stop is not None:
        given["stop"] = tuple(body.stop)
    if body.stop_token_ids is not None:
        check_token_ids("stop_token_ids", body.stop_token_ids, info)
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        given["logit_bias"] = _logit_bias(body.logit_bias, info)
    try:
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given
        )
    except SamplingParamsError as error:
        raise engine_error(error) from error


def _logit_bias(given: dict[str, float], info: EngineInfo) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise bad_request(
            "logit_bias", f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS}"
        )
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request(
                "logit_bias", f"logit_bias has the key {shown(key)}; keys are token ids, like '42'"
            )
        token_id = int(key)
        check_token_ids("logit_bias", [token_id], info)
        biases[token_id] = bias
    return biases


def check_best_of(body: GenerationBody) -> None:
    """Only as many are sampled as are returned."""
    if body.best_of not in (None, 1, body.num_choices):
        raise bad_request(
            "best_of",
            f"best_of is {shown(body.best_of)}; only n ({body.num_choices}) is supported: use n",
            code="unsupported_parameter",
        )


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options needs stream to be true")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request(
            "prompt_logprobs", "prompt_logprobs is not available with stream; ask without stream"
        )
