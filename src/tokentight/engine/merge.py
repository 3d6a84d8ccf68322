"""Two consecutive outputs of a request as one."""

from __future__ import annotations

from dataclasses import replace

from tokentight.engine.outputs import RequestOutput


def merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """What a caller missed while it did not look: `earlier` followed by `later`."""
    assert earlier.request_id == later.request_id
    assert not earlier.finished
    logprobs = None
    if earlier.logprobs is not None and later.logprobs is not None:
        logprobs = earlier.logprobs + later.logprobs
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=logprobs,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
    )
