"""From the name a user gives to a model on disk."""

from __future__ import annotations

import re
from pathlib import Path

from tokentight.models.demo_model import DEMO_MODEL_ALIAS, demo_model_path
from tokentight.models.errors import ModelNotFoundError

# Weights as safetensors, and what is needed to read them: never pickles, never code.
_HUB_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# The same weights again in another layout, and other exports in folders of their own.
_HUB_IGNORED = ("consolidated*", "*/*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(name: str) -> Path:
    """The directory or GGUF file that `name` stands for.

    `name` is the alias of the demo model, an existing directory, a `.gguf` file, or a Hugging
    Face hub id, whose safetensors are fetched into the hub's own cache.

    Raises:
        ModelNotFoundError: when it is none of these, or the hub cannot be reached.
        DemoModelError: when the demo model cannot be fetched.
    """
    if name == DEMO_MODEL_ALIAS:
        return demo_model_path()
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelNotFoundError(
            f"model {name!r} is a file but not a .gguf; name a .gguf file, or the directory that "
            "holds config.json and the safetensors"
        )
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf") or not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"model {name!r} was not found: it must be {DEMO_MODEL_ALIAS!r}, an existing directory "
            "or .gguf file, or a Hugging Face id such as 'Qwen/Qwen3-8B'"
        )
    return _from_hub(name)


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    elsewhere = (
        "Fetch it where the hub is reachable (`hf download "
        f"{hub_id}`) and name the directory, or use a local directory or .gguf file"
    )
    try:
        return Path(
            snapshot_download(
                hub_id,
                allow_patterns=list(_HUB_PATTERNS),
                ignore_patterns=list(_HUB_IGNORED),
            )
        )
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"model {hub_id!r} is gated: accept its terms on the hub and log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"model {hub_id!r} is neither a local path nor a model on the hub (or it is private: "
            "log in with `hf auth login`). Check the spelling"
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise ModelNotFoundError(
            f"model {hub_id!r} is not in the local cache, and the Hugging Face hub cannot be "
            f"reached or offline mode is on (HF_HUB_OFFLINE). {elsewhere}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelNotFoundError(
            f"model {hub_id!r} could not be fetched from the Hugging Face hub: {error}. {elsewhere}"
        ) from error
