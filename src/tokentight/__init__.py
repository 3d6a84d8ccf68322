"""Token-tight LLM serving: nothing swallowed, nothing duplicated, nothing leaked."""

__version__ = "0.1.0"
