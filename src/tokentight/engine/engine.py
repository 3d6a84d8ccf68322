"""Offline use: prompts in, completions out, on the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from tokentight.engine.build import EngineParts, build_engine
from tokentight.engine.config import EngineConfig
from tokentight.engine.merge import merge
from tokentight.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from tokentight.engine.request import GenerationRequest
from tokentight.engine.status import EngineInfo, EngineStats
from tokentight.models.tokenizer import Tokenizer
from tokentight.pipeline.processes import LoadingProgress
from tokentight.sampling.params import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one prompt.

    `logprobs` has an entry for each of `token_ids`, `prompt_logprobs` one for each prompt token
    (None for the first); each is None unless asked for.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    num_cached_tokens: int
    error: str | None = None


class Engine:
    """An engine for use inside a program.

    >>> with Engine(EngineConfig(model="smollm2-135m")) as engine:
    ...     [answer] = engine.generate(["The capital of France is"], SamplingParams(temperature=0))

    Not thread-safe. Close it, or use it as a context manager, so that its stages end.
    """

    def __init__(self, config: EngineConfig, progress: LoadingProgress | None = None) -> None:
        self._parts: EngineParts = build_engine(config, lambda _reason: None, progress)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    @property
    def info(self) -> EngineInfo:
        return self._parts.info

    def stats(self) -> EngineStats:
        return self._parts.core.stats()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        on_finished: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Complete all prompts (texts or token ids), batched as the engine sees fit.

        One `SamplingParams` serves all prompts, or each has its own. `on_finished` is called with
        the index of each prompt as it is done.

        Raises:
            RequestError: a prompt cannot be served; nothing has been computed then.
            EngineDeadError: the stages are lost for good, or the engine was closed.
        """
        core = self._parts.core
        requests = self._requests(prompts, sampling_params)
        limits = [self._parts.admission.max_num_tokens(request) for request in requests]
        index_of: dict[int, int] = {}
        outputs: dict[int, RequestOutput] = {}
        try:
            for index, (request, limit) in enumerate(zip(requests, limits, strict=True)):
                index_of[core.add(request, limit)] = index
            while core.has_work:
                for update in core.step():
                    index = index_of[update.request_number]
                    known = outputs.get(index)
                    outputs[index] = merge(known, update.output) if known else update.output
                    if update.output.finished and on_finished is not None:
                        on_finished(index)
        except BaseException:
            for number in index_of:
                core.abort(number)
            raise
        return [_completion(request, outputs[i]) for i, request in enumerate(requests)]

    def close(self) -> None:
        """End the stages. Idempotent."""
        self._parts.core.end("the engine was closed")
        self._parts.pipeline.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[GenerationRequest]:
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(sampling_params)} sampling_params were given for {len(prompts)} prompts; "
                "give one for all or one for each"
            )
        return [
            GenerationRequest(
                request_id=str(index),
                prompt_token_ids=tuple(
                    self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                ),
                params=params,
            )
            for index, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        ]


def _completion(request: GenerationRequest, output: RequestOutput) -> Completion:
    assert output.finish_reason is not None
    return Completion(
        prompt_token_ids=request.prompt_token_ids,
        token_ids=output.token_ids,
        text=output.text,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
    )
