"""Answers over HTTP from the real engine: the same alone and among others, whole and streamed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from running_service import RunningService

COMPLETIONS = "/v1/completions"


def ask(service: RunningService, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{service.url}{COMPLETIONS}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def ask_streamed(service: RunningService, body: dict[str, Any]) -> tuple[str, list[float]]:
    text, logprobs = "", []
    with httpx.stream(
        "POST", f"{service.url}{COMPLETIONS}", json={**body, "stream": True}, timeout=60
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        text += choice["text"]
        logprobs += choice["logprobs"]["token_logprobs"]
    return text, logprobs


def bodies() -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"request {i}: " + "tell me more, " * (i % 5),
            "max_tokens": 8 + i % 9,
            "temperature": 0.0 if i % 2 else 0.9,
            "seed": i,
            "logprobs": 2,
            "echo": i % 3 == 0,
            "ignore_eos": True,
        }
        for i in range(24)
    ]


def test_24_at_once_get_what_each_gets_alone(real_service: RunningService) -> None:
    """Tokens, texts and logprobs, bit for bit: JSON carries floats so that they read back equal."""
    alone = [ask(real_service, body) for body in bodies()]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda body: ask(real_service, body), bodies()))
        streamed = list(pool.map(lambda body: ask_streamed(real_service, body), bodies()))
    assert together == alone
    for (text, logprobs), (choice,) in zip(streamed, alone, strict=True):
        assert text == choice["text"]
        assert logprobs == choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood_scores_the_continuation_as_generation_does(
    real_service: RunningService, max_tokens: int
) -> None:
    """What lm_eval sends for a loglikelihood: the logprobs of an echoed prompt are those that
    the same tokens had when the model said them greedily."""
    context = list(range(40, 70))
    said = ask(
        real_service,
        {"prompt": context, "max_tokens": 6, "temperature": 0, "logprobs": 1}
        | {"ignore_eos": True, "return_token_ids": True},
    )[0]
    scored = ask(
        real_service,
        {
            "model": "tiny",
            "prompt": [context + said["token_ids"]],
            "max_tokens": max_tokens,
            "logprobs": 1,
            "echo": True,
            "temperature": 0,
            "seed": 1234,
        },
    )[0]["logprobs"]
    place = len(context)
    assert scored["token_logprobs"][place : place + 6] == said["logprobs"]["token_logprobs"]
    for own, top in zip(
        scored["token_logprobs"][place : place + 6], scored["top_logprobs"][place:], strict=False
    ):
        assert own == max(top.values())


def test_prompt_logprobs_and_echo_agree(real_service: RunningService) -> None:
    body = {"prompt": "né, once more", "max_tokens": 1, "echo": True, "logprobs": 2}
    choice = ask(real_service, {**body, "prompt_logprobs": 2, "return_token_ids": True})[0]
    ids = choice["prompt_token_ids"]
    assert choice["prompt_logprobs"][0] is None
    for token_id, entry, logprob in zip(
        ids[1:],
        choice["prompt_logprobs"][1:],
        choice["logprobs"]["token_logprobs"][1:],
        strict=False,
    ):
        assert entry[str(token_id)]["logprob"] == logprob


def test_text_offsets_point_at_the_tokens(real_service: RunningService) -> None:
    body = {"prompt": "plain words né", "max_tokens": 8, "echo": True, "logprobs": 0}
    choice = ask(real_service, {**body, "logit_bias": {str(i): 100 for i in range(60, 70)}})[0]
    logprobs = choice["logprobs"]
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not name.startswith(("bytes:", "<")):
            assert choice["text"][offset : offset + len(name)] == name


def test_chat_with_a_special_token_in_the_template(real_service: RunningService) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "temperature": 0,
        "return_token_ids": True,
    }
    got = real_service.client.post("/v1/chat/completions", json=body).json()
    tokens = real_service.client.post("/tokenize", json={"messages": body["messages"]}).json()
    assert got["prompt_token_ids"] == tokens["tokens"]
    text = real_service.client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text["prompt"] == "<|user|>Hi\n<|assistant|>"
