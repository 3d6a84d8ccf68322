"""What a caller is told, piece by piece, against a plain reading of the whole answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engine_driver import LetterTokenizer
from hypothesis import given
from hypothesis import strategies as st

from tokentight.engine.merge import merge
from tokentight.engine.output_stream import Ending, OutputStream
from tokentight.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from tokentight.engine.request import GenerationRequest, Request
from tokentight.sampling.params import SamplingParams

EOS = 4
LETTERS = [chr(0x100 + token_id) for token_id in range(5)]

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 8),
    stop=st.lists(
        st.lists(st.sampled_from(LETTERS[:3]), min_size=1, max_size=3).map("".join), max_size=2
    ).map(tuple),
    stop_token_ids=st.sampled_from([(), (), (3,), (EOS,)]),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0]),
    prompt_logprobs=st.sampled_from([None, 0]),
)


@dataclass
class Expected:
    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    stop: int | str | None


def plain_reading(tokens: list[int], asked: SamplingParams) -> Expected:
    """The answer read from its tokens one by one, as the API's documentation puts it."""
    text = ""
    for count, token_id in enumerate(tokens, start=1):
        seen = tuple(tokens[:count])
        reason, stop = None, None
        if token_id == EOS and not asked.ignore_eos:
            reason = FinishReason.STOP
        elif token_id in asked.stop_token_ids:
            reason, stop = FinishReason.STOP, token_id
        if reason is not None and not asked.include_stop_str_in_output:
            return Expected(seen, text, reason, stop)
        text += LETTERS[token_id]
        ends = [string for string in asked.stop if text.endswith(string)]
        if ends:
            found = max(ends, key=len)
            kept = text if asked.include_stop_str_in_output else text[: -len(found)]
            return Expected(seen, kept, FinishReason.STOP, found)
        if reason is not None:
            return Expected(seen, text, reason, stop)
        if count == asked.max_tokens:
            return Expected(seen, text, FinishReason.LENGTH, None)
    raise AssertionError("the tokens do not suffice")


def stream_of(asked: SamplingParams) -> tuple[Request, OutputStream]:
    assert asked.max_tokens is not None
    request = Request(GenerationRequest("r", (1, 2), asked), 0, 0, 2 + asked.max_tokens)
    for index in range(len(request.prompt_logprobs) - 1):
        request.record_prompt_logprob(index + 1, TokenLogprobs(2, -1.0, 1, ()))
    return request, OutputStream(request, LetterTokenizer(), frozenset({EOS}))


def outputs_of(tokens: list[int], asked: SamplingParams) -> list[RequestOutput]:
    request, stream = stream_of(asked)
    outputs: list[RequestOutput] = []
    for token_id in tokens:
        request.ledger.append(token_id)
        logprobs = None if asked.logprobs is None else TokenLogprobs(token_id, -0.5, 1, ())
        output, ending = stream.token(token_id, logprobs)
        outputs.append(output)
        assert output.finished == (ending is not None)
        if ending is not None:
            break
    return outputs


@given(params, st.lists(st.integers(0, 4), min_size=8, max_size=8), st.data())
def test_the_pieces_are_the_answer(
    asked: SamplingParams, tokens: list[int], data: st.DataObject
) -> None:
    outputs = outputs_of(tokens, asked)
    expected = plain_reading(tokens, asked)
    cut = data.draw(st.integers(1, len(outputs)))
    whole = outputs[0]
    for output in outputs[1:cut]:
        whole = merge(whole, output)
    assert expected.text.startswith(whole.text), "text was told that is not of the answer"
    for output in outputs[cut:]:
        whole = merge(whole, output)
    assert whole.token_ids == expected.token_ids
    assert whole.text == expected.text
    assert (whole.finish_reason, whole.stop_reason) == (expected.reason, expected.stop)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if asked.logprobs is None:
        assert whole.logprobs is None
    else:
        assert whole.logprobs is not None
        assert tuple(entry.token_id for entry in whole.logprobs) == whole.token_ids
    told = [output.prompt_logprobs is not None for output in outputs]
    wanted = asked.prompt_logprobs is not None
    assert told == [wanted] + [False] * (len(outputs) - 1)
    assert (whole.prompt_logprobs is not None) == wanted


def test_only_text_that_may_begin_a_stop_string_is_held_back() -> None:
    asked = SamplingParams(max_tokens=8, stop=(LETTERS[1] + LETTERS[2],))
    texts = [output.text for output in outputs_of([0, 1, 1, 0, 1, 2], asked)]
    assert texts == [LETTERS[0], "", LETTERS[1], LETTERS[1] + LETTERS[0], "", ""]


def test_text_held_back_is_told_at_the_end_where_no_stop_string_came_of_it() -> None:
    asked = SamplingParams(max_tokens=2, stop=(LETTERS[1] + LETTERS[2],))
    assert [output.text for output in outputs_of([0, 1], asked)] == LETTERS[:2]
    asked = SamplingParams(max_tokens=8, stop=(LETTERS[1] + LETTERS[2],), stop_token_ids=(3,))
    assert [output.text for output in outputs_of([1, 3], asked)] == ["", LETTERS[1]]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ERROR])
def test_a_request_that_ends_without_a_token_is_told_its_prompt_logprobs_once(
    reason: FinishReason,
) -> None:
    """`max_tokens=0` asks for the prompt alone."""
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=0)
    _, stream = stream_of(asked)
    output = stream.end(Ending(reason), "why")
    assert output.prompt_logprobs == (None, TokenLogprobs(2, -1.0, 1, ()))
    assert (output.text, output.token_ids, output.logprobs) == ("", (), ())
    assert (output.finish_reason, output.error) == (reason, "why")


def test_prompt_logprobs_that_are_not_all_there_are_not_told() -> None:
    asked = SamplingParams(max_tokens=4, prompt_logprobs=0)
    request = Request(GenerationRequest("r", (1, 2, 3), asked), 0, 0, 7)
    stream = OutputStream(request, LetterTokenizer(), frozenset())
    assert stream.end(Ending(FinishReason.ERROR), "stopped").prompt_logprobs is None
