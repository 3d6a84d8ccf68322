"""Every refusal has its status, OpenAI's shape, and names what is wrong."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from running_service import RunningService

from tokentight.server.engine_api import EngineStatus

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return body["error"]


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [258]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [1] * 513}, "prompt"),
    ({"prompt": [1] * 512}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
    ({"prompt": [1] * 500, "max_tokens": 13}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": -1}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"suffix": "x"}, "suffix"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"no_such_thing": 1}, "no_such_thing"),
    ({"messages": [USER]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_completions_400_names_the_parameter(
    service: RunningService, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": "a", **fields}
    error = error_of(service.client.post(COMPLETIONS, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split("[", maxsplit=1)[0].rsplit(".", maxsplit=1)[-1] in error["message"]
    assert len(error["message"]) < 500


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{**USER, "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content"),
    ({"messages": [USER, USER]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"max_tokens": 510}, "max_tokens"),
    ({"max_completion_tokens": 510}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"functions": [{}]}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"echo": True}, "echo"),
    ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_chat_400_names_the_parameter(
    service: RunningService, fields: dict[str, Any], param: str
) -> None:
    error = error_of(service.client.post(CHAT, json={"messages": [USER], **fields}), 400)
    assert (error["param"] or "").startswith(param)


def test_neutral_values_of_what_is_not_offered_are_accepted(service: RunningService) -> None:
    body = {
        "messages": [USER],
        "max_tokens": 1,
        "tools": None,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "store": False,
        "service_tier": "auto",
        "user": "anybody",
        "best_of": 1,
    }
    assert service.client.post(CHAT, json=body).status_code == 200


def test_a_prompt_too_long_is_told_both_lengths(service: RunningService) -> None:
    error = error_of(service.client.post(COMPLETIONS, json={"prompt": [1] * 600}), 400)
    assert "600" in error["message"]
    assert "512" in error["message"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"seed": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_not_json_is_400(service: RunningService, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error = error_of(service.client.post(COMPLETIONS, content=body, headers=headers), 400)
    assert "JSON" in error["message"]


def test_a_number_beyond_all_floats_is_400(service: RunningService) -> None:
    headers = {"Content-Type": "application/json"}
    body = b'{"prompt": "a", "temperature": 1e999}'
    error = error_of(service.client.post(COMPLETIONS, content=body, headers=headers), 400)
    assert error["param"] == "temperature"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_another_models_name_is_404(service: RunningService, path: str) -> None:
    body = {
        COMPLETIONS: {"prompt": "a"},
        CHAT: {"messages": [USER]},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }[path]
    error = error_of(service.client.post(path, json={**body, "model": "gpt-5"}), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "fake-model" in error["message"]


def test_404_405_415(service: RunningService) -> None:
    client = service.client
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/models/nothing"), 404)
    response = client.get(COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(client.post(COMPLETIONS, content=b"{}"), 415)
    error_of(client.post(COMPLETIONS, data={"prompt": "a"}), 415)


def test_413_whether_the_length_is_announced_or_not(serve: Any) -> None:
    service = serve(FakeEngine(), max_body_bytes=1000)
    headers = {"Content-Type": "application/json"}
    body = b'{"prompt": "' + b"a" * 2000 + b'"}'
    announced = service.client.post(COMPLETIONS, content=body, headers=headers)
    assert "1000" in error_of(announced, 413)["message"]
    chunked = service.client.post(
        COMPLETIONS, content=(body[i : i + 100] for i in range(0, len(body), 100)), headers=headers
    )
    error_of(chunked, 413)
    assert service.client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_429_with_retry_after_and_nothing_left_behind(serve: Any) -> None:
    """Two of three choices find room; all are given up, and the next request is served."""
    engine = FakeEngine(max_requests=2)
    service = serve(engine)
    response = service.client.post(COMPLETIONS, json={"prompt": "a", "n": 3})
    assert error_of(response, 429)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "2"
    assert engine.idle.wait(10)
    assert engine.num_aborted == 2
    assert service.client.post(COMPLETIONS, json={"prompt": "a", "n": 2}).status_code == 200


def test_503_when_dead_or_draining(serve: Any) -> None:
    engine = FakeEngine()
    service = serve(engine)
    engine.status, engine.status_detail = EngineStatus.DEAD, "stage 1 died 4 times"
    error = error_of(service.client.post(COMPLETIONS, json={"prompt": "a"}), 503)
    assert "stage 1 died 4 times" in error["message"]
    assert service.client.get("/health").status_code == 503
    engine.status = EngineStatus.DRAINING
    response = service.client.post(COMPLETIONS, json={"prompt": "a"})
    error_of(response, 503)
    assert response.headers["connection"] == "close"
    assert service.client.get("/health").status_code == 200
    assert service.client.get("/ready").status_code == 503


@pytest.mark.parametrize(("dies", "expected"), [(False, 500), (True, 503)])
def test_an_engine_error_answers_500_and_503_when_it_died(
    serve: Any, dies: bool, expected: int
) -> None:
    engine = FakeEngine(fails_with="audit violation in step 7", dies=dies)
    service = serve(engine)
    for body in ({"prompt": "a"}, {"prompt": "a", "n": 3}):
        engine.status = EngineStatus.READY
        error = error_of(service.client.post(COMPLETIONS, json=body), expected)
        assert error["type"] == "server_error"
        assert "audit violation in step 7" in error["message"]
        assert engine.idle.wait(10)


@pytest.mark.parametrize("dies", [False, True])
def test_an_engine_error_ends_a_stream_without_done(serve: Any, dies: bool) -> None:
    service = serve(FakeEngine(fails_with="audit violation", dies=dies))
    body = {"prompt": "a", "stream": True}
    with service.client.stream("POST", COMPLETIONS, json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert "audit violation" in lines[-1]
    assert lines[-1].startswith('data: {"error":')
    assert all("[DONE]" not in line for line in lines)


def test_a_fault_of_our_own_is_500_without_a_traceback(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    service = serve(engine)
    engine.tokenizer.encode = None  # type: ignore[assignment, method-assign]
    headers = {"X-Request-Id": "mine-1"}
    response = service.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    error = error_of(response, 500)
    assert "mine-1" in error["message"]
    assert "Traceback" not in response.text
    assert "NoneType" not in response.text
    assert any(record.exc_info for record in caplog.records)
