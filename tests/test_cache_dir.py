"""The user's cache directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tokentight.cache_dir import CacheDirError, cache_directory


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TOKENTIGHT_CACHE_DIR": "own", "XDG_CACHE_HOME": "xdg"}, "own"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/tokentight"),
        ({}, "home/.cache/tokentight"),
    ],
)
def test_where_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    expected: str,
) -> None:
    """The first of the two variables that is set, else under the home directory; 0700."""
    for name in ("TOKENTIGHT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    directory = cache_directory("things")
    assert directory == tmp_path / expected / "things"
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700


def test_it_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENTIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheDirError, match=r"cannot be made .* set TOKENTIGHT_CACHE_DIR"):
        cache_directory("things")


def test_it_belongs_to_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENTIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(CacheDirError, match=r"belongs to another user .* of your own"):
        cache_directory("things")
