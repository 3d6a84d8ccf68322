"""The answers of a quiet and a loaded pass, compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokentight.demo.client import Answer, Pass
from tokentight.demo.questions import Question


@dataclass(frozen=True, slots=True)
class Difference:
    """A question that was answered differently, and in what."""

    index: int
    title: str
    what: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both passes and the questions whose answers differ between them."""

    model: str
    stages: int
    asked: tuple[Question, ...]
    quiet: Pass
    loaded: Pass
    differences: tuple[Difference, ...]

    @property
    def num_identical(self) -> int:
        return len(self.asked) - len(self.differences)

    @property
    def speedup(self) -> float:
        """Throughput of the loaded pass over that of the quiet one."""
        return self.loaded.tokens_per_second / self.quiet.tokens_per_second

    def to_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "stages": self.stages,
            "requests": len(self.asked),
            "identical": self.num_identical,
            "differences": [
                {"request": d.index, "question": d.title, "what": list(d.what)}
                for d in self.differences
            ],
            "quiet": _pass_to_json(self.quiet),
            "loaded": _pass_to_json(self.loaded),
            "speedup": self.speedup,
        }


def compare(
    model: str, stages: int, asked: Sequence[Question], quiet: Pass, loaded: Pass
) -> Comparison:
    """Compare two passes over the same questions."""
    differences = []
    for index, question in enumerate(asked):
        what = differing_parts(quiet.answers[index], loaded.answers[index])
        if what:
            differences.append(Difference(index, question.title, what))
    return Comparison(model, stages, tuple(asked), quiet, loaded, tuple(differences))


def differing_parts(quiet: Answer, loaded: Answer) -> tuple[str, ...]:
    """The names of the parts in which two answers to one question differ."""
    parts = {
        "prompt token ids": quiet.prompt_token_ids == loaded.prompt_token_ids,
        "token ids": quiet.token_ids == loaded.token_ids,
        "logprobs": quiet.logprob_bits == loaded.logprob_bits,
        "text": quiet.text == loaded.text,
    }
    return tuple(name for name, same in parts.items() if not same)


def _pass_to_json(measured: Pass) -> dict[str, object]:
    return {
        "concurrency": measured.concurrency,
        "peak_running": measured.peak_running,
        "seconds": measured.seconds,
        "output_tokens": measured.num_output_tokens,
        "output_tokens_per_second": measured.tokens_per_second,
    }
