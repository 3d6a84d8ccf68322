"""Where stages listen."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from tokentight.pipeline.transport import Endpoints


def test_only_this_user_can_enter_and_nothing_stays() -> None:
    endpoints = Endpoints.create()
    assert stat.S_IMODE(endpoints.directory.stat().st_mode) == 0o700
    endpoints.remove()
    assert not endpoints.directory.exists()


def test_a_path_too_long_for_a_socket_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(OSError, match="set TMPDIR to a directory with a shorter path"):
        Endpoints.create()
    assert list(deep.iterdir()) == []
