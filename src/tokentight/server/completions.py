"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokentight.server.completion_choice import CompletionChoice, joined
from tokentight.server.engine_api import GenerationRequest
from tokentight.server.errors import bad_request
from tokentight.server.generation import Generation
from tokentight.server.prompts import (
    Prompt,
    check_best_of,
    check_length,
    check_stream_options,
    check_token_ids,
    sampling_params,
    text_or_ids,
)
from tokentight.server.protocol import CompletionRequest
from tokentight.server.service import Service, new_id
from tokentight.server.streaming import DONE, event, respond
from tokentight.server.strict_json import StrictJsonRoute
from tokentight.server.usage import Usage


def completions_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        model = service.served_name(body.model)
        prompts = await _checked_prompts(service, body)
        completion = _Completion(service, body, model, prompts)
        return await respond(
            completion,
            request.receive,
            stream=body.stream is True,
            send_timeout_s=service.config.client_timeout_s,
        )

    return router


async def _checked_prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    check_best_of(body)
    check_stream_options(body)
    num_choices = len(body.prompt) * body.num_choices
    if num_choices > service.config.max_choices:
        raise bad_request(
            "prompt",
            f"{len(body.prompt)} prompts times n={body.num_choices} are {num_choices} choices; "
            f"at most {service.config.max_choices} are allowed in one request",
        )
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        raise bad_request(
            "max_tokens",
            "max_tokens is 0, which needs echo or prompt_logprobs; else set it to at least 1",
        )
    tokenizer, info = service.engine.tokenizer, service.engine.info
    prompts = []
    for given in body.prompt:
        prompt = await text_or_ids(tokenizer, given, body.add_special_tokens is not False)
        check_length("prompt", prompt, body.max_tokens, info, "max_tokens")
        check_token_ids("prompt", prompt.token_ids, info)
        prompts.append(prompt)
    return prompts


class _Completion:
    """One request being answered. Submitted to the engine when it is made.

    Raises:
        ApiError: a parameter out of range, or the engine takes no more requests.
    """

    def __init__(
        self, service: Service, body: CompletionRequest, model: str, prompts: Sequence[Prompt]
    ) -> None:
        self._body = body
        self._n = body.num_choices
        self._choices = [
            CompletionChoice(service.engine.tokenizer, body, index, prompts[index // self._n])
            for index in range(len(prompts) * self._n)
        ]
        self._usage = Usage(sum(len(prompt.token_ids) for prompt in prompts), self._n)
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.fingerprint,
        }
        params = sampling_params(
            body,
            service.engine.info,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=_num_prompt_logprobs(body),
        )
        self._generation = Generation(
            service.engine,
            service.metrics,
            [
                GenerationRequest(
                    request_id=f"{self._head['id']}-{index}",
                    prompt_token_ids=prompts[index // self._n].token_ids,
                    params=params,
                    choice=index % self._n,
                    cache_salt=body.cache_salt or "",
                    skip_special_tokens=body.skip_special_tokens is not False,
                )
                for index in range(len(self._choices))
            ],
        )

    def abort(self) -> None:
        self._generation.abort()

    async def whole(self) -> dict[str, Any]:
        parts: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async for index, output in self._generation.outputs():
            self._usage.add(index, output)
            parts[index].append(self._choices[index].add(output))
        choices = [joined(choice_parts) for choice_parts in parts]
        return {**self._head, "choices": choices, "usage": self._usage.as_dict()}

    async def events(self) -> AsyncIterator[bytes]:
        usage = {"usage": None} if self._body.include_usage else {}
        async for index, output in self._generation.outputs():
            self._usage.add(index, output)
            choice = self._choices[index].add(output)
            yield event({**self._head, "choices": [choice], **usage})
        if self._body.include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.as_dict()})
        yield DONE


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """`echo` with `logprobs` needs those of the prompt as much as `prompt_logprobs` does."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((number for number in wanted if number is not None), default=None)
