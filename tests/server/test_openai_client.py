"""The official `openai` client against the real engine, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from running_service import RunningService

MESSAGES = [{"role": "user", "content": "Hi, né?"}]


@pytest.fixture(scope="module")
def client(real_service: RunningService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{real_service.url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {
        "model": "tiny",
        "prompt": ["once", "né"],
        "max_tokens": 12,
        "n": 2,
        "seed": 3,
        "temperature": 0.8,
        "logprobs": 2,
    }
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = [""] * 4
    logprobs: list[list[float]] = [[] for _ in range(4)]
    usage = None
    for chunk in client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == whole.usage.total_tokens


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_completion_tokens": 20,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("length", "stop")
    text, entries, roles, reasons = "", [], [], []
    for chunk in client.chat.completions.create(**asked, stream=True):
        (part,) = chunk.choices
        roles.append(part.delta.role)
        text += part.delta.content or ""
        reasons.append(part.finish_reason)
        if part.logprobs is not None:
            entries += part.logprobs.content
    assert text == choice.message.content
    assert [entry.logprob for entry in entries] == [e.logprob for e in choice.logprobs.content]
    assert roles[0] == "assistant"
    assert reasons[-1] == choice.finish_reason


def test_extra_parameters_and_cached_tokens(client: openai.OpenAI) -> None:
    """The second time the prompt's full blocks come from the cache, except with another salt."""
    prompt = "a long enough prompt, " * 5

    def cached(salt: str) -> int:
        got = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=2,
            extra_body={"cache_salt": salt, "ignore_eos": True, "top_k": -1},
        )
        assert got.usage.completion_tokens == 2
        return got.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("one") == len(prompt) // 16 * 16
    assert cached("two") == 0


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"


def test_a_stream_that_is_closed_early_frees_its_blocks(
    client: openai.OpenAI, real_service: RunningService
) -> None:
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    real_service.wait_until_idle()
    assert real_service.metric("request_success_total", 'finished_reason="abort",') == 1
