"""JSON files beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokentight.models.errors import CheckpointError


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in `path`; an empty one where the file is absent and not required."""
    if not path.exists():
        if not required:
            return {}
        raise CheckpointError(
            f"{path} is missing; a Hugging Face directory holds it beside its weights"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value
