"""Finding and reading the small files of a model's directory."""

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


def only_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory that holds no safetensors; None where it holds no GGUF either.

    Raises:
        CheckpointError: when there are several to choose from.
    """
    if any(directory.glob("*.safetensors*")):
        return None
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise CheckpointError(
            f"{directory} holds {len(files)} .gguf files ({names}); name the one to load"
        )
    return files[0] if files else None
