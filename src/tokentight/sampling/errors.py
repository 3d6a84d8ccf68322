"""What goes wrong when tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping


class SamplingError(ValueError):
    """Rows that no token can be sampled from. `reasons` says why, by row."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"row {row}: {reason}" for row, reason in reasons.items()))
        self.reasons = dict(reasons)
