"""An engine that computes nothing: deterministic outputs, made as fast as a test lets them.

Tokens are bytes; two more are special. The output of a request follows from its prompt, seed and
choice alone, and holds characters of two and three bytes, so that tokens split characters.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from tokentight.models.errors import ChatTemplateError
from tokentight.server.engine_api import (
    EngineDeadError,
    EngineDrainingError,
    EngineInfo,
    EngineStats,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    QueueFullError,
    RequestOutput,
    TokenLogprobs,
)

EOS, BOS = 256, 257
VOCAB_SIZE = 258
ALPHABET = "abc déf 漢字 xyz."


class ByteTokenizer:
    """One token a byte, and a BOS before a text."""

    is_byte_level = True
    bos_token_id = BOS
    eos_token_ids = (EOS,)
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = (i for i in token_ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(self.token_bytes(i) for i in shown).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if any(one["role"] == two["role"] for one, two in itertools.pairwise(messages)):
            raise ChatTemplateError("roles must alternate")
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return text + str(variables or "") + "<assistant>" * add_generation_prompt

    def token_bytes(self, token_id: int) -> bytes:
        return {EOS: b"<eos>", BOS: b"<bos>"}.get(token_id) or bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id > 255


def output_bytes(request: GenerationRequest, number: int) -> bytes:
    """The first `number` bytes of what this engine says to a request."""
    key = repr((request.prompt_token_ids, request.params.seed, request.choice)).encode()
    said, block = b"", 0
    while len(said) < number:
        digest = hashlib.sha256(key + block.to_bytes(4, "big")).digest()
        said += "".join(ALPHABET[byte % len(ALPHABET)] for byte in digest).encode()
        block += 1
    return said[:number]


def logprobs_of(token_id: int, place: int, num_top: int) -> TokenLogprobs:
    rank = 1 + (token_id + place) % 3
    logprob = -0.1 * rank - place / 1000
    top = [((token_id + i + 1) % 256, -0.1 * (i + 1) - place / 1000) for i in range(num_top)]
    if rank <= num_top:
        top[rank - 1] = (token_id, logprob)
    return TokenLogprobs(token_id, logprob, rank, tuple(top))


class FakeStream:
    """Outputs not taken yet are merged, as the engine does."""

    def __init__(self, on_abort: Callable[[], None]) -> None:
        self._pending: RequestOutput | None = None
        self._error: EngineDeadError | None = None
        self._ready = asyncio.Event()
        self._ended = False
        self._on_abort = on_abort

    def put(self, new: RequestOutput) -> None:
        old = self._pending
        if old is not None:
            new = RequestOutput(
                request_id=old.request_id,
                text=old.text + new.text,
                token_ids=old.token_ids + new.token_ids,
                logprobs=None if old.logprobs is None else old.logprobs + (new.logprobs or ()),
                prompt_logprobs=old.prompt_logprobs,
                num_cached_tokens=old.num_cached_tokens,
                finish_reason=new.finish_reason,
                stop_reason=new.stop_reason,
                error=new.error,
            )
        self._pending = new
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while not self._ended:
            await self._ready.wait()
            self._ready.clear()
            output, self._pending = self._pending, None
            if output is None:
                assert self._error is not None
                raise self._error
            self._ended = output.finished
            yield output

    def fail(self, error: EngineDeadError) -> None:
        self._pending, self._error = None, error
        self._ready.set()

    def abort(self) -> None:
        self._ended = True
        self._on_abort()


class FakeEngine:
    """Set `gate` to a cleared `threading.Event` to hold outputs back after `free_tokens` each."""

    def __init__(
        self,
        *,
        max_model_len: int = 512,
        max_requests: int = 4096,
        step_s: float = 0.0,
        fails_with: str | None = None,
        dies: bool = False,
    ) -> None:
        self.tokenizer = ByteTokenizer()
        self.info = EngineInfo("fake-model", max_model_len, VOCAB_SIZE, 1, "fake", True, 64, 16)
        self.status = EngineStatus.READY
        self.status_detail = ""
        self.gate: threading.Event | None = None
        self.free_tokens = 3
        self.arrived = threading.Event()
        self.made_free_tokens = threading.Event()
        self.submitted: list[GenerationRequest] = []
        self.num_aborted = 0
        self.num_tokens_made = 0
        self.aborted = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        self._max_requests = max_requests
        self._step_s = step_s
        self._fails_with = fails_with
        self._dies = dies
        self._open: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, FakeStream] = {}

    def submit(self, request: GenerationRequest) -> FakeStream:
        if self.status is EngineStatus.DEAD:
            raise EngineDeadError(self.status_detail)
        if self.status is EngineStatus.DRAINING:
            raise EngineDrainingError("draining")
        if len(self._open) >= self._max_requests:
            raise QueueFullError(1.5)
        assert request.request_id not in self._open
        self.submitted.append(request)
        stream = FakeStream(lambda: self._abort(request.request_id))
        self.idle.clear()
        self.arrived.set()
        self._streams[request.request_id] = stream
        self._open[request.request_id] = asyncio.create_task(self._run(request, stream))
        return stream

    def _abort(self, request_id: str) -> None:
        task = self._open.get(request_id)
        if task is not None:
            task.cancel()
            self.num_aborted += 1
            self._forget(request_id)
            self.aborted.set()

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._streams.pop(request_id, None)
        if not self._open:
            self.idle.set()

    async def _run(self, request: GenerationRequest, stream: FakeStream) -> None:
        params, prompt = request.params, request.prompt_token_ids
        limit = self.info.max_model_len - len(prompt)
        number = limit if params.max_tokens is None else params.max_tokens
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        if params.prompt_logprobs is not None:
            scored = [logprobs_of(t, i, params.prompt_logprobs) for i, t in enumerate(prompt)]
            prompt_logprobs = (None, *scored[1:])
        said = ""
        for place, token_id in enumerate(output_bytes(request, number)):
            if self.gate is not None and place == self.free_tokens:
                self.made_free_tokens.set()
                await asyncio.to_thread(self.gate.wait)
            await asyncio.sleep(self._step_s)
            self.num_tokens_made += 1
            text = decoder.decode(bytes([token_id]), final=place == number - 1)
            said += text
            reason = FinishReason.LENGTH if place == number - 1 else None
            stop = next((s for s in params.stop if s in said), None)
            if stop is not None:
                kept = said[: said.index(stop)]
                text = kept[len(said) - len(text) :]
                reason = FinishReason.STOP
            if self._fails_with is not None and place == 2:
                if self._dies:
                    self.status = EngineStatus.DEAD
                    stream.fail(EngineDeadError(self._fails_with))
                    break
                reason = FinishReason.ERROR
            stream.put(
                RequestOutput(
                    request_id=request.request_id,
                    text=text,
                    token_ids=(token_id,),
                    logprobs=None
                    if params.logprobs is None
                    else (logprobs_of(token_id, len(prompt) + place, params.logprobs),),
                    prompt_logprobs=prompt_logprobs if place == 0 else None,
                    num_cached_tokens=len(prompt) // 2,
                    finish_reason=reason,
                    stop_reason=stop,
                    error=self._fails_with if reason is FinishReason.ERROR else None,
                )
            )
            if reason is not None:
                break
        if number == 0:
            stream.put(
                RequestOutput(
                    request_id=request.request_id,
                    text="",
                    token_ids=(),
                    logprobs=None if params.logprobs is None else (),
                    prompt_logprobs=prompt_logprobs,
                    num_cached_tokens=0,
                    finish_reason=FinishReason.LENGTH,
                    stop_reason=None,
                )
            )
        self._forget(request.request_id)

    def stats(self) -> EngineStats:
        return EngineStats(len(self._open), 0, 0.25, 1, 2, self.num_tokens_made, 8, 4, 0, 3)

    async def drain(self) -> None:
        self.status = EngineStatus.DRAINING
        await asyncio.gather(*self._open.values(), return_exceptions=True)

    async def shutdown(self) -> None:
        self.status = EngineStatus.DEAD
        for request_id, stream in list(self._streams.items()):
            self._open[request_id].cancel()
            stream.fail(EngineDeadError("the engine was shut down"))
