"""What can be wrong with a model. Torch-free, like everything a tokenizer needs."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """A model that this engine cannot serve as its author meant it, and why."""


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, damaged or of a kind that is not read."""


class ChatTemplateError(ValueError):
    """A chat that the model's template does not accept, or a template that is none."""


class ModelNotFoundError(ValueError):
    """No model goes by that name, and what would."""


class DemoModelError(RuntimeError):
    """The demo model could not be fetched, and what to do next."""
