"""1,000 requests drawn from the API's own fields with values of every kind, over the real engine:
none is answered 500, none leaves a request or a block behind, and good ones are still answered
as before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_service import RunningService

from tokentight.server import neutral
from tokentight.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

BODIES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
pytestmark = [pytest.mark.slow, pytest.mark.ci]

GOOD = {"prompt": "The good one", "max_tokens": 8, "seed": 5, "logprobs": 3, "echo": True}

texts = st.text(max_size=20)
integers = st.one_of(st.integers(-3, 300), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**25]))
scalars = st.one_of(st.none(), st.booleans(), integers, st.floats(), texts)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
ids = st.lists(st.integers(0, 250), min_size=1, max_size=5)
prompts = st.one_of(
    texts.filter(bool),
    st.lists(texts, max_size=3),
    ids,
    st.lists(ids, min_size=1, max_size=3),
    st.lists(integers),
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"]), "content": texts},
        optional={"name": texts},
    ),
    min_size=1,
    max_size=3,
)
# Values that pass, so that one wrong field is met behind many right ones.
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "prompt": prompts,
    "messages": messages,
    "model": st.sampled_from(["tiny", None]),
    "max_tokens": st.integers(0, 5),
    "max_completion_tokens": st.integers(0, 5),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "stream_options": st.sampled_from([None, {"include_usage": True}]),
    "top_logprobs": st.integers(0, 5),
    "prompt_logprobs": st.integers(0, 5),
    "echo": st.booleans(),
    "stop": st.one_of(texts.filter(bool), st.lists(texts.filter(bool), max_size=3)),
    "seed": st.integers(0, 2**64 - 1),
    "logit_bias": st.dictionaries(st.integers(0, 250).map(str), st.floats(-100, 100)),
    "tokens": st.lists(st.integers(0, 250)),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "top_k": st.integers(-1, 9),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "skip_special_tokens": st.booleans(),
    "add_special_tokens": st.booleans(),
    "stop_token_ids": ids,
    "user": texts,
    "cache_salt": texts,
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(list(BODIES)))
    known = list(BODIES[path].model_fields)
    names = set(draw(st.lists(st.sampled_from(known), max_size=6)))
    names |= {name for name in ("prompt", "messages", "tokens") if name in known}
    if "max_tokens" in known:
        names.add("max_tokens")  # most contexts are short, and so is the time
    body = {name: draw(PLAUSIBLE.get(name, st.none())) for name in sorted(names)}
    if draw(st.booleans()):
        wrong = draw(st.sampled_from([*known, *neutral.CHAT, "unknown"]))
        body[wrong] = draw(anything)
    raw = json.dumps(body).encode()  # NaN and infinities as Python writes them
    if draw(st.integers(0, 9)) == 0:
        cut = draw(st.integers(0, len(raw)))
        raw = raw[:cut] + draw(st.binary(max_size=4)) + raw[cut:]
    return path, raw


@pytest.fixture(scope="module")
def good_answer(real_service: RunningService) -> Any:
    return real_service.client.post("/v1/completions", json=GOOD).json()["choices"]


@settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(request=requests())
def test_malformed_requests(
    real_service: RunningService, good_answer: Any, request: tuple[str, bytes]
) -> None:
    path, raw = request
    headers = {"Content-Type": "application/json"}
    response = real_service.client.post(path, content=raw, headers=headers)
    if response.status_code == 200:
        assert not response.content.startswith(b'{"error"')
        assert b'data: {"error"' not in response.content
        return
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(error["message"]) < 1000


def test_after_them_nothing_is_left_and_the_good_one_is_still_right(
    real_service: RunningService, good_answer: Any
) -> None:
    real_service.wait_until_idle()
    again = real_service.client.post("/v1/completions", json=GOOD).json()["choices"]
    assert again == good_answer
