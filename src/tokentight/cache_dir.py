"""Where this user's downloads and compiled code are kept."""

from __future__ import annotations

import os
from pathlib import Path


class CacheDirError(OSError):
    """A cache directory that cannot be used, and what to do about it."""


def cache_dir() -> Path:
    """`TOKENTIGHT_CACHE_DIR`, else `XDG_CACHE_HOME/tokentight`, else `~/.cache/tokentight`.

    Created readable by this user alone, since what lies in it is loaded and run.

    Raises:
        CacheDirError: when it cannot be created, or belongs to somebody else.
    """
    chosen = os.environ.get("TOKENTIGHT_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        path = Path(chosen).expanduser()
    elif base and os.path.isabs(base):
        path = Path(base) / "tokentight"
    else:
        path = Path.home() / ".cache" / "tokentight"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:
        raise CacheDirError(
            f"the cache directory {path} cannot be created ({error.strerror}); set "
            "TOKENTIGHT_CACHE_DIR to a directory that can"
        ) from error
    if owner != os.getuid():
        raise CacheDirError(
            f"the cache directory {path} belongs to user id {owner}, not to you; set "
            "TOKENTIGHT_CACHE_DIR to a directory of your own"
        )
    return path
