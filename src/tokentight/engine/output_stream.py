"""From sampled tokens to what the caller is told: text, stop conditions, logprobs."""

from __future__ import annotations

from dataclasses import dataclass

from tokentight.engine.detokenizer import DetokenizerTokenizer, IncrementalDetokenizer
from tokentight.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from tokentight.engine.request import Request
from tokentight.engine.stop_strings import StopStringMatcher


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ends, and the stop token or stop string that ended it."""

    reason: FinishReason
    stop: int | str | None = None


class OutputStream:
    """Turns one request's tokens into its outputs, in order."""

    def __init__(
        self, request: Request, tokenizer: DetokenizerTokenizer, eos_token_ids: frozenset[int]
    ) -> None:
        params = request.params
        self._request = request
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, request.asked.prompt_token_ids, request.asked.skip_special_tokens
        )
        self._matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output)
        self._prompt_logprobs_told = not request.wants_prompt_logprobs

    def token(
        self, token_id: int, logprobs: TokenLogprobs | None
    ) -> tuple[RequestOutput, Ending | None]:
        """The output for a token just appended to the ledger, and whether it ends the request."""
        ending = self._ending_of_token(token_id)
        hidden = (
            ending is not None
            and ending.reason is FinishReason.STOP
            and not self._request.params.include_stop_str_in_output
        )
        text, matched = "", None
        if not hidden:
            text, matched = self._matcher.push(self._detokenizer.push([token_id]))
        if matched is not None:
            ending = Ending(FinishReason.STOP, matched)
        elif ending is not None:
            rest, ending = self._flush(ending)
            text += rest
        return self._output(text, (token_id,), logprobs, ending), ending

    def end(self, ending: Ending, error: str | None = None) -> RequestOutput:
        """The last output of a request that ends without a new token."""
        return self._output("", (), None, ending, error)

    def _ending_of_token(self, token_id: int) -> Ending | None:
        params = self._request.params
        if token_id in self._eos_token_ids:
            return Ending(FinishReason.STOP)
        if token_id in params.stop_token_ids:
            return Ending(FinishReason.STOP, token_id)
        if self._request.num_tokens >= self._request.max_num_tokens:
            return Ending(FinishReason.LENGTH)
        return None

    def _flush(self, ending: Ending) -> tuple[str, Ending]:
        text, matched = self._matcher.push(self._detokenizer.finish())
        if matched is not None:
            return text, Ending(FinishReason.STOP, matched)
        return text + self._matcher.flush(), ending

    def _output(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: TokenLogprobs | None,
        ending: Ending | None,
        error: str | None = None,
    ) -> RequestOutput:
        request = self._request
        prompt_logprobs = None
        if not self._prompt_logprobs_told and request.prompt_logprobs_complete:
            prompt_logprobs = request.prompt_logprobs
            self._prompt_logprobs_told = True
        wanted = request.params.logprobs is not None
        return RequestOutput(
            request_id=request.asked.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=((logprobs,) if logprobs is not None else ()) if wanted else None,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=None if ending is None else ending.reason,
            stop_reason=None if ending is None else ending.stop,
            error=error,
        )
