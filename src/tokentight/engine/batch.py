"""The driver's batch rows: what a plan needs per request and would be slow to gather anew.

One row is one fixed-size record: block table and sampling parameters together. Rows are compacted
by moving whole records. There is no "first n tokens" of a record to copy, so no stale tail of a
row's former occupant can survive a move. The rows hold no tokens and no token counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentight.engine.request import Request
from tokentight.pipeline.plan import NO_LOGPROBS

NO_BLOCK = 0
"""Block-table entries past a row's last block; never read."""


def record_dtype(max_blocks_per_request: int) -> np.dtype[np.void]:
    """The layout of one row."""
    return np.dtype(
        [
            ("request_number", np.int64),
            ("seed", np.uint64),
            ("num_blocks", np.int32),
            ("choice", np.int32),
            ("top_k", np.int32),
            ("num_logprobs", np.int32),
            ("temperature", np.float32),
            ("top_p", np.float32),
            ("min_p", np.float32),
            ("repetition_penalty", np.float32),
            ("presence_penalty", np.float32),
            ("frequency_penalty", np.float32),
            ("block_table", np.int32, (max_blocks_per_request,)),
        ]
    )


class BatchRows:
    """Rows of the running requests, dense from 0: `records[:num_rows]` are in use."""

    def __init__(self, max_num_seqs: int, max_blocks_per_request: int) -> None:
        self.records: NDArray[Any] = np.zeros(max_num_seqs, record_dtype(max_blocks_per_request))
        self._row_of: dict[int, int] = {}

    @property
    def num_rows(self) -> int:
        return len(self._row_of)

    def rows_of(self, requests: Sequence[Request]) -> NDArray[np.intp]:
        """The rows where the requests stand."""
        return np.array([self._row_of[request.number] for request in requests], dtype=np.intp)

    def add(self, request: Request) -> None:
        """Give the request the next row."""
        row = len(self._row_of)
        params = request.params
        record = self.records[row : row + 1]
        record[:] = np.zeros(1, self.records.dtype)
        record["request_number"] = request.number
        record["seed"] = request.seed
        record["choice"] = request.asked.choice
        record["top_k"] = params.top_k
        record["num_logprobs"] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        record["temperature"] = params.temperature
        record["top_p"] = params.top_p
        record["min_p"] = params.min_p
        record["repetition_penalty"] = params.repetition_penalty
        record["presence_penalty"] = params.presence_penalty
        record["frequency_penalty"] = params.frequency_penalty
        self._row_of[request.number] = row
        self.append_blocks(request, request.block_ids)

    def append_blocks(self, request: Request, block_ids: Sequence[int]) -> None:
        """Extend the request's block table."""
        record = self.records[self._row_of[request.number]]
        start = int(record["num_blocks"])
        record["block_table"][start : start + len(block_ids)] = block_ids
        record["num_blocks"] = start + len(block_ids)

    def remove(self, request: Request) -> None:
        """Take the request's row away and move the last row, whole, into the gap."""
        row = self._row_of.pop(request.number)
        last = len(self._row_of)
        if row != last:
            self.records[row] = self.records[last]
            self._row_of[int(self.records[row]["request_number"])] = row
