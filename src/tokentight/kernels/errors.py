"""What can keep the native kernels from serving."""

from __future__ import annotations


class NativeUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, not a mistake
    """The native kernels cannot be built or loaded here; the message says why and what to do."""
