"""Reading a step's result: whose logprobs are whose."""

from __future__ import annotations

from collections.abc import Iterator

from tokentight.engine.outputs import TokenLogprobs
from tokentight.pipeline.plan import Logprobs, StepPlan


def token_logprobs(
    logprobs: Logprobs, index: int, token_id: int, num_logprobs: int
) -> TokenLogprobs:
    """Entry `index`, with as many of the most likely tokens as its request wants."""
    top_ids = logprobs.top_token_ids[index, :num_logprobs].tolist()
    top_values = logprobs.top_logprobs[index, :num_logprobs].tolist()
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs.logprob[index]),
        rank=int(logprobs.rank[index]),
        top=tuple(zip(top_ids, top_values, strict=True)),
    )


def prompt_logprobs_of(
    plan: StepPlan, scored: Logprobs
) -> Iterator[tuple[int, int, TokenLogprobs]]:
    """The plan's row, the place in its prompt, and the logprob of every scored token. The logprob
    is NaN where the model's logits were not finite."""
    indices = plan.scored_token_indices
    columns = (
        plan.rows_of(indices),
        plan.positions[indices].tolist(),
        plan.scored_targets.tolist(),
    )
    for index, (row, position, token_id) in enumerate(zip(*columns, strict=True)):
        num_logprobs = int(plan.scored_num_logprobs[index])
        yield row, position + 1, token_logprobs(scored, index, token_id, num_logprobs)
