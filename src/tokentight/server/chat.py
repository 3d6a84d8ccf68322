"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokentight.server.engine_api import GenerationRequest, RequestOutput
from tokentight.server.errors import bad_request, shown
from tokentight.server.generation import Generation
from tokentight.server.logprobs import chat_logprobs, prompt_logprobs
from tokentight.server.prompts import (
    Prompt,
    chat_prompt,
    check_best_of,
    check_length,
    check_stream_options,
    sampling_params,
)
from tokentight.server.protocol import ChatCompletionRequest
from tokentight.server.service import Service, new_id
from tokentight.server.streaming import DONE, event, respond
from tokentight.server.strict_json import StrictJsonRoute
from tokentight.server.usage import Usage


def chat_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        model = service.served_name(body.model)
        check_best_of(body)
        check_stream_options(body)
        max_tokens, param = _max_tokens(body)
        prompt = await chat_prompt(service.engine.tokenizer, body)
        check_length("messages", prompt, max_tokens, service.engine.info, param)
        chat = _ChatCompletion(service, body, model, prompt, max_tokens)
        return await respond(
            chat,
            request.receive,
            stream=body.stream is True,
            send_timeout_s=service.config.client_timeout_s,
        )

    return router


def _max_tokens(body: ChatCompletionRequest) -> tuple[int | None, str]:
    """OpenAI renamed `max_tokens` to `max_completion_tokens`; both mean the same here."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(
            "max_tokens",
            f"max_tokens is {shown(old)} and max_completion_tokens is {shown(new)}; they mean the "
            "same: give one",
        )
    name, value = ("max_completion_tokens", new) if new is not None else ("max_tokens", old)
    if value == 0 and body.prompt_logprobs is None:
        raise bad_request(name, f"{name} is 0; it must be at least 1 without prompt_logprobs")
    return value, name


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
        return None
    return body.top_logprobs or 0


class _ChatCompletion:
    """One request being answered. Submitted to the engine when it is made.

    Raises:
        ApiError: a parameter out of range, or the engine takes no more requests.
    """

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        model: str,
        prompt: Prompt,
        max_tokens: int | None,
    ) -> None:
        self._tokenizer = service.engine.tokenizer
        self._body = body
        self._prompt = prompt
        self._num_logprobs = _num_logprobs(body)
        self._usage = Usage(len(prompt.token_ids), body.num_choices)
        self._head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.fingerprint,
        }
        params = sampling_params(
            body,
            service.engine.info,
            max_tokens=max_tokens,
            logprobs=self._num_logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )
        self._generation = Generation(
            service.engine,
            service.metrics,
            [
                GenerationRequest(
                    request_id=f"{self._head['id']}-{index}",
                    prompt_token_ids=prompt.token_ids,
                    params=params,
                    choice=index,
                    cache_salt=body.cache_salt or "",
                    skip_special_tokens=body.skip_special_tokens is not False,
                )
                for index in range(body.num_choices)
            ],
        )

    def abort(self) -> None:
        self._generation.abort()

    async def whole(self) -> dict[str, Any]:
        outputs: list[list[RequestOutput]] = [[] for _ in range(self._body.num_choices)]
        async for index, output in self._generation.outputs():
            self._usage.add(index, output)
            outputs[index].append(output)
        choices = [self._choice(index, parts) for index, parts in enumerate(outputs)]
        response: dict[str, Any] = {
            **self._head,
            "choices": choices,
            "usage": self._usage.as_dict(),
        }
        if self._body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, outputs[0][0].prompt_logprobs or (), self._body.prompt_logprobs
            )
        if self._body.return_token_ids:
            response["prompt_token_ids"] = list(self._prompt.token_ids)
        return response

    def _choice(self, index: int, parts: list[RequestOutput]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            **self._about_tokens(parts),
        }

    def _about_tokens(self, parts: list[RequestOutput]) -> dict[str, Any]:
        """What a choice says of its tokens and its end, in a whole response and in a chunk."""
        last = parts[-1]
        fields: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": last.finish_reason and last.finish_reason.value,
            "stop_reason": last.stop_reason,
        }
        if self._num_logprobs is not None:
            entries = [entry for part in parts for entry in part.logprobs or ()]
            fields["logprobs"] = chat_logprobs(self._tokenizer, entries, self._num_logprobs)
        if self._body.return_token_ids:
            fields["token_ids"] = [token_id for part in parts for token_id in part.token_ids]
        return fields

    async def events(self) -> AsyncIterator[bytes]:
        for index in range(self._body.num_choices):
            yield self._chunk([self._opening(index)], with_prompt=index == 0)
        async for index, output in self._generation.outputs():
            self._usage.add(index, output)
            delta = {"content": output.text}
            choice = {"index": index, "delta": delta, **self._about_tokens([output])}
            yield self._chunk([choice])
        if self._body.include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.as_dict()})
        yield DONE

    def _opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def _chunk(self, choices: list[dict[str, Any]], *, with_prompt: bool = False) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._body.include_usage:
            chunk["usage"] = None
        if with_prompt and self._body.return_token_ids:
            chunk["prompt_token_ids"] = list(self._prompt.token_ids)
        return event(chunk)
