"""What callers may send: the request bodies of OpenAI's API, with vLLM's additions.

Types are strict (no "1" for 1, no true for 1, no NaN) and unknown fields are refused. A field that
is null has its default, except that `max_tokens` null is as many tokens as the context allows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tokentight.server import neutral

MAX_N = 128

_STRING_OR_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        },
    ]
}


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompts(value: object) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if _is_token_ids(value):
        return [value]  # type: ignore[list-item]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(_is_token_ids(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt",
        "it must be a string, a list of strings, a list of token ids, or a list of lists of "
        "token ids, none of them an empty list",
    )


def _strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _content(value: object) -> object:
    """Text parts become one text, a line each."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not (
            isinstance(part, dict)
            and part.keys() == {"type", "text"}
            and part["type"] == "text"
            and isinstance(part["text"], str)
        ):
            raise PydanticCustomError(
                "content",
                "a part must be an object with type 'text' and a string text, and nothing else",
            )
        texts.append(part["text"])
    return "\n".join(texts)


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[
        list[str] | None,
        BeforeValidator(_strings),
        WithJsonSchema({"anyOf": [*_STRING_OR_STRINGS["anyOf"], {"type": "null"}]}),
    ] = None
    user: str | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0)

    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    return_token_ids: bool | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT)]
    max_tokens: int | None = 16
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        return neutral.without_neutral(fields, neutral.COMPLETION)


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content), WithJsonSchema(_CONTENT)]
    name: str | None = None

    def as_template_input(self) -> dict[str, Any]:
        """As chat templates know it: they have no `developer`, OpenAI's later name of `system`."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


TemplateVariables = dict[str, bool | int | float | str]


class ChatCompletionRequest(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    chat_template_kwargs: TemplateVariables | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    add_generation_prompt: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        return neutral.without_neutral(fields, neutral.CHAT)


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
