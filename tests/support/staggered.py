"""Runs requests that arrive and are aborted at chosen steps of a real engine's loop."""

from __future__ import annotations

from dataclasses import dataclass

from tokentight.engine.engine import Completion, Engine, _completion
from tokentight.engine.merge import merge
from tokentight.engine.outputs import RequestOutput
from tokentight.engine.request import GenerationRequest
from tokentight.sampling.params import SamplingParams


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it arrives, and the one before which it is aborted."""

    prompt: tuple[int, ...]
    params: SamplingParams
    step: int = 0
    aborted: int | None = None
    salt: str = ""


def run_staggered(engine: Engine, arrivals: list[Arrival]) -> list[Completion | None]:
    """Each request's answer, None for those that were aborted before their end."""
    core, admission = engine._parts.core, engine._parts.admission
    requests = [
        GenerationRequest(str(index), arrival.prompt, arrival.params, cache_salt=arrival.salt)
        for index, arrival in enumerate(arrivals)
    ]
    numbers: dict[int, int] = {}
    outputs: dict[int, RequestOutput] = {}
    last_arrival = max(arrival.step for arrival in arrivals)
    step = 0
    while core.has_work or step <= last_arrival:
        for index, arrival in enumerate(arrivals):
            if arrival.step == step:
                number = core.add(requests[index], admission.max_num_tokens(requests[index]))
                numbers[number] = index
            if arrival.aborted == step:
                for number in [n for n, i in numbers.items() if i == index]:
                    core.abort(number)
        for update in core.step():
            index = numbers[update.request_number]
            known = outputs.get(index)
            outputs[index] = merge(known, update.output) if known else update.output
        step += 1
    return [
        _completion(request, outputs[index])
        if index in outputs and outputs[index].finished
        else None
        for index, request in enumerate(requests)
    ]
