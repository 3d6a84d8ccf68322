"""`/v1/chat/completions`, `/tokenize` and `/detokenize` over a stand-in engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import BOS
from running_service import RunningService

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
IDS = list(b"<user>Hi\n<assistant>")


def post(service: RunningService, path: str = PATH, **body: Any) -> Any:
    response = service.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(service: RunningService, **body: Any) -> list[Any]:
    with service.client.stream("POST", PATH, json={**body, "stream": True}) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def test_the_template_makes_the_prompt(service: RunningService) -> None:
    got = post(service, messages=[USER], max_tokens=4, return_token_ids=True)
    assert got["object"] == "chat.completion"
    assert got["prompt_token_ids"] == IDS
    (choice,) = got["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == bytes(choice["token_ids"]).decode("utf-8", "replace")
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert got["usage"]["prompt_tokens"] == len(IDS)
    assert got["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "content", ["one\ntwo", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]]
)
def test_text_parts_are_lines_of_one_text(service: RunningService, content: Any) -> None:
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": content}]
    got = post(service, messages=messages, max_tokens=1, return_token_ids=True)
    assert bytes(got["prompt_token_ids"]) == b"<system>s\n<user>one\ntwo\n<assistant>"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(service: RunningService, name: str) -> None:
    assert post(service, messages=[USER], **{name: 5})["usage"]["completion_tokens"] == 5


def test_without_a_limit_the_context_is_filled(service: RunningService) -> None:
    assert post(service, messages=[USER])["usage"]["total_tokens"] == 512


@pytest.mark.parametrize(
    "asked", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 3, "seed": 5}, {"stop": "."}]
)
def test_stream_joins_to_the_whole_response(service: RunningService, asked: dict[str, Any]) -> None:
    body = {"messages": [USER], "max_tokens": 30, "return_token_ids": True, **asked}
    whole = post(service, **body)
    chunks = streamed(service, **body, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        first, *rest = parts
        assert first["delta"] == {"role": "assistant", "content": ""}
        text = "".join(part["delta"]["content"] for part in rest)
        assert text == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert [i for part in rest for i in part["token_ids"]] == choice["token_ids"]
        if choice["logprobs"] is not None:
            content = [entry for part in rest for entry in part["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]


def test_logprobs_have_as_many_alternatives_as_asked(service: RunningService) -> None:
    got = post(service, messages=[USER], max_tokens=3, logprobs=True, top_logprobs=2)
    content = got["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"]).decode("latin-1") == entry["token"] or entry[
            "token"
        ].startswith("bytes:")
    got = post(service, messages=[USER], max_tokens=1, logprobs=True)
    assert got["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_template_variables_reach_the_template(service: RunningService) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    tokens = post(service, "/tokenize", **body)["tokens"]
    assert b"{'enable_thinking': False}" in bytes(tokens)


def test_tokenize_and_back(service: RunningService) -> None:
    got = post(service, "/tokenize", prompt="né", return_token_strs=True)
    assert got == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS, *"né".encode()],
        "token_strs": ["<bos>", "n", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert post(service, "/tokenize", prompt="a", add_special_tokens=False)["tokens"] == [97]
    assert post(service, "/tokenize", messages=[USER])["tokens"] == IDS
    assert post(service, "/detokenize", tokens=got["tokens"]) == {"prompt": "<bos>né"}


def test_tokenizer_info(service: RunningService) -> None:
    assert service.client.get("/tokenizer_info").json() == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": None,
        "chat_template": None,
    }
