"""Parameters of the OpenAI API and of vLLM that are not offered here.

They are accepted with a value that asks for nothing, since clients send those by default, and
refused with any other: nothing a caller asks for is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokentight.server.errors import bad_request, shown

COMMON: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "early_stopping": (None, False),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1.0),
    "logits_processors": (None, []),
    "min_tokens": (None, 0),
    "priority": (None, 0),
    "response_format": (None, {"type": "text"}),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}

COMPLETION: Mapping[str, tuple[Any, ...]] = {**COMMON, "suffix": (None,)}

CHAT: Mapping[str, tuple[Any, ...]] = {
    **COMMON,
    "audio": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}


def without_neutral(fields: object, neutral: Mapping[str, tuple[Any, ...]]) -> object:
    """`fields` without the parameters that ask for nothing.

    Raises:
        ApiError: 400, naming a parameter that asks for something not offered.
    """
    if not isinstance(fields, dict):
        return fields
    kept = {}
    for name, value in fields.items():
        if name not in neutral:
            kept[name] = value
        elif not any(_same(value, allowed) for allowed in neutral[name]):
            offered = ", ".join(_json(allowed) for allowed in neutral[name])
            raise bad_request(
                name,
                f"{name} is {shown(value)}, which is not supported here; leave it out, or set it "
                f"to {offered}",
                code="unsupported_parameter",
            )
    return kept


def _same(value: object, allowed: object) -> bool:
    if isinstance(allowed, bool) or isinstance(value, bool):
        return value is allowed
    return value == allowed


def _json(value: object) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
