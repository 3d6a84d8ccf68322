"""What cannot be served is refused before it is queued, naming the value and what is allowed."""

from __future__ import annotations

import pytest

from tokentight.engine.admission import Admission
from tokentight.engine.errors import RequestError
from tokentight.engine.request import GenerationRequest
from tokentight.sampling.params import SamplingParams

ADMISSION = Admission(vocab_size=100, max_model_len=10)


def asked(num_prompt_tokens: int, **params: object) -> GenerationRequest:
    return GenerationRequest(
        "r",
        tuple(range(num_prompt_tokens)),
        SamplingParams(**params),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("request_", "limit"),
    [
        (asked(4, max_tokens=3), 7),
        (asked(4, max_tokens=6), 10),
        (asked(4, max_tokens=None), 10),
        (asked(10, max_tokens=0), 10),
    ],
)
def test_what_fits_is_admitted(request_: GenerationRequest, limit: int) -> None:
    assert ADMISSION.max_num_tokens(request_) == limit


@pytest.mark.parametrize(
    ("request_", "param", "said"),
    [
        (asked(0), "prompt", "prompt is empty"),
        (asked(11, max_tokens=0), "prompt", "11 tokens; the context length is 10"),
        (asked(10, max_tokens=None), "prompt", "leaves no room"),
        (asked(8, max_tokens=3), "max_tokens", "8 tokens and max_tokens is 3, together 11"),
        (asked(2, max_tokens=1, stop_token_ids=(100,)), "stop_token_ids", "token id 100"),
        (asked(2, max_tokens=1, logit_bias={-1: 1.0}), "logit_bias", "ids 0 to 99"),
        (GenerationRequest("r", (5, 100), SamplingParams()), "prompt", "token id 100"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    request_: GenerationRequest, param: str, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ADMISSION.max_num_tokens(request_)
    assert caught.value.param == param
    assert said in caught.value.message
