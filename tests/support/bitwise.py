"""What "the same answer" means: every token, every logprob, every prompt logprob, bit for bit."""

from __future__ import annotations

from tokentight.engine.engine import Completion
from tokentight.engine.outputs import TokenLogprobs


def answer_bits(completion: Completion) -> tuple[object, ...]:
    """Everything a caller sees of an answer that must not depend on load. Floats are spelled in
    hexadecimal, so that equality is equality of bits."""
    return (
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        completion.error,
        _bits(completion.logprobs),
        _bits(completion.prompt_logprobs),
    )


def _bits(entries: tuple[TokenLogprobs | None, ...] | None) -> object:
    if entries is None:
        return None
    return tuple(
        entry
        and (
            entry.token_id,
            entry.logprob.hex(),
            entry.rank,
            tuple((token_id, logprob.hex()) for token_id, logprob in entry.top),
        )
        for entry in entries
    )
