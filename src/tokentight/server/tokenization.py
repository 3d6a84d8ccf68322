"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`.

With these, lm_eval needs no tokenizer of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from tokentight.server.errors import bad_request
from tokentight.server.logprobs import token_name
from tokentight.server.prompts import chat_prompt, check_token_ids, text_or_ids
from tokentight.server.protocol import DetokenizeRequest, TokenizeRequest
from tokentight.server.service import Service
from tokentight.server.streaming import JsonResponse
from tokentight.server.strict_json import StrictJsonRoute


def tokenization_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute)
    tokenizer = service.engine.tokenizer

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> JsonResponse:
        service.served_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "give either prompt or messages")
        if body.messages is not None:
            prompt = await chat_prompt(tokenizer, body)
        else:
            assert body.prompt is not None
            prompt = await text_or_ids(tokenizer, body.prompt, body.add_special_tokens is not False)
        response: dict[str, Any] = {
            "count": len(prompt.token_ids),
            "max_model_len": service.engine.info.max_model_len,
            "tokens": list(prompt.token_ids),
        }
        if body.return_token_strs:
            response["token_strs"] = [token_name(tokenizer, token) for token in prompt.token_ids]
        return JsonResponse(response)

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> JsonResponse:
        service.served_name(body.model)
        check_token_ids("tokens", body.tokens, service.engine.info)
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
        return JsonResponse({"prompt": text})

    @router.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> dict[str, Any]:
        """The special tokens and the chat template, null where the model has none."""
        bos, eos, template = (
            tokenizer.bos_token_id,
            tokenizer.eos_token_ids,
            tokenizer.chat_template,
        )
        return {
            "bos_token": None if bos is None else token_name(tokenizer, bos),
            "eos_token": token_name(tokenizer, eos[0]) if eos else None,
            "pad_token": None,
            "chat_template": None if template is None else template.source,
        }

    return router
