"""`/v1/completions` in OpenAI's shape, whole and streamed, over a stand-in engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import BOS, EOS, output_bytes
from running_service import RunningService

from tokentight.server.engine_api import GenerationRequest, SamplingParams

PATH = "/v1/completions"


def expected_text(prompt: list[int], number: int, choice: int = 0, seed: int | None = None) -> str:
    request = GenerationRequest(
        request_id="",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(seed=seed),
        choice=choice,
    )
    return output_bytes(request, number).decode("utf-8", "replace")


def post(service: RunningService, **body: Any) -> dict[str, Any]:
    response = service.client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(service: RunningService, path: str = PATH, **body: Any) -> list[Any]:
    with service.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(response.iter_text()).split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def test_a_string_prompt_gets_16_tokens_by_default(service: RunningService) -> None:
    got = post(service, prompt="Hi", model="fake-model")
    assert got["object"] == "text_completion"
    assert got["model"] == "fake-model"
    assert got["choices"] == [
        {
            "index": 0,
            "text": expected_text([BOS, *b"Hi"], 16),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert got["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_every_kind_of_prompt_times_n(
    service: RunningService, prompt: Any, ids: list[list[int]]
) -> None:
    """Choices are numbered prompt * n + choice, each with its own answer."""
    got = post(service, prompt=prompt, n=2, seed=7, max_tokens=9)
    assert [choice["index"] for choice in got["choices"]] == list(range(2 * len(ids)))
    assert [choice["text"] for choice in got["choices"]] == [
        expected_text(one, 9, choice, seed=7) for one in ids for choice in range(2)
    ]
    assert got["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert got["usage"]["completion_tokens"] == 9 * 2 * len(ids)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True},
        {"n": 3, "seed": 1, "return_token_ids": True},
        {"echo": True, "logprobs": 3, "prompt": ["é", "éa"], "n": 2},
        {"stop": ["."], "max_tokens": 60},
    ],
)
def test_stream_joins_to_the_whole_response(service: RunningService, asked: dict[str, Any]) -> None:
    body = {"prompt": "Hé", "max_tokens": 21, **asked}
    whole = post(service, **body)
    streamed = events(service, **body, stream_options={"include_usage": True})
    usage = streamed.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in streamed}) == 1
    assert all(chunk["usage"] is None for chunk in streamed)
    for choice in whole["choices"]:
        parts = [c for chunk in streamed for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [v for part in parts for v in part["logprobs"][name]] == values
        if "token_ids" in choice:
            assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_usage_is_not_streamed_unasked(service: RunningService) -> None:
    assert all("usage" not in chunk for chunk in events(service, prompt="a"))


def test_echo_with_logprobs_covers_the_prompt(service: RunningService) -> None:
    """The first prompt token has no logprob; offsets count characters of the choice's text."""
    got = post(service, prompt="né", echo=True, logprobs=2, max_tokens=4, seed=0)
    choice = got["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("né")
    assert logprobs["tokens"][:4] == ["<bos>", "n", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][:5] == [0, 0, 1, 1, 2]
    assert {len(values) for values in logprobs.values()} == {4 + 4}
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not name.startswith(("bytes:", "<")):
            assert choice["text"][offset] == name
    for own, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert own in top.values()


@pytest.mark.parametrize("asked", [{"echo": True}, {"echo": True, "logprobs": 1}])
def test_max_tokens_0_echoes_the_prompt_alone(
    service: RunningService, asked: dict[str, Any]
) -> None:
    choice = post(service, prompt="abc", max_tokens=0, **asked)["choices"][0]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    if "logprobs" in asked:
        assert len(choice["logprobs"]["tokens"]) == 4


def test_prompt_logprobs_in_vllms_shape(service: RunningService) -> None:
    choice = post(service, prompt=[97, 98, 99], prompt_logprobs=2, max_tokens=1)["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token_id, entry in zip((98, 99), others, strict=True):
        assert next(iter(entry)) == str(token_id)
        assert entry[str(token_id)]["decoded_token"] == chr(token_id)
        assert 2 <= len(entry) <= 3
        for scored in entry.values():
            assert scored.keys() == {"logprob", "rank", "decoded_token"}
    assert choice["logprobs"] is None


def test_vllms_extras_reach_the_engine(serve: Any) -> None:
    from fake_engine import FakeEngine

    engine = FakeEngine()
    service = serve(engine)
    post(
        service,
        prompt="a",
        add_special_tokens=False,
        top_k=-1,
        min_p=0.5,
        repetition_penalty=1.5,
        stop_token_ids=[EOS],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        cache_salt="s",
        logit_bias={"97": 3},
        stop="x",
    )
    (request,) = engine.submitted
    assert request.prompt_token_ids == (97,)
    assert request.cache_salt == "s"
    assert request.skip_special_tokens is False
    assert request.params == SamplingParams(
        max_tokens=16,
        top_k=0,
        min_p=0.5,
        repetition_penalty=1.5,
        stop_token_ids=(EOS,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        logit_bias={97: 3.0},
        stop=("x",),
    )


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood_as_lm_eval_asks_and_reads_it(
    service: RunningService, max_tokens: int
) -> None:
    """lm_eval's local-completions: context and continuation as token ids, echoed with logprobs."""
    context, continuation = [97, 98, 99], [100, 101]
    got = post(
        service,
        model="fake-model",
        prompt=[context + continuation, context],
        max_tokens=max_tokens,
        logprobs=1,
        echo=True,
        temperature=0,
        seed=1234,
    )
    for choice, length in zip(got["choices"], (5, 3), strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == length + max_tokens
        scored = logprobs["token_logprobs"][1:length]
        tops = logprobs["top_logprobs"][1:length]
        assert all(own <= max(top.values()) for own, top in zip(scored, tops, strict=True))


def test_generation_as_lm_eval_asks_it(service: RunningService) -> None:
    got = post(
        service,
        model="fake-model",
        prompt=["abc", "abd"],
        max_tokens=256,
        temperature=0,
        stop=["\n\n", "."],
        seed=1234,
    )
    for choice in got["choices"]:
        assert "." not in choice["text"]
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == "."
