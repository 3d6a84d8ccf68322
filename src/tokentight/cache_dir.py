"""Where this user's downloads and compiled code are kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path


class CacheDirError(OSError):
    """A cache directory that cannot be used, and what to do about it."""


def cache_directory(name: str) -> Path:
    """The directory `name` in `$TOKENTIGHT_CACHE_DIR`, else in `$XDG_CACHE_HOME/tokentight`, else
    in `~/.cache/tokentight`.

    Made on first use, for this user alone: what lies in it is loaded and run.

    Raises:
        CacheDirError: it cannot be made, is a link, or is somebody else's to write.
    """
    directory = _root() / name
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise CacheDirError(
            f"the cache directory {directory} cannot be made ({error.strerror or error}); "
            "set TOKENTIGHT_CACHE_DIR to a writable directory of your own"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise CacheDirError(
            f"the cache directory {directory} is not a directory (a link, perhaps); "
            "remove it or set TOKENTIGHT_CACHE_DIR"
        )
    if found.st_uid != os.geteuid():
        raise CacheDirError(
            f"the cache directory {directory} belongs to another user (uid {found.st_uid}); "
            "set TOKENTIGHT_CACHE_DIR to a directory of your own"
        )
    if found.st_mode & 0o022:
        raise CacheDirError(
            f"others may write to the cache directory {directory} "
            f"(mode {stat.S_IMODE(found.st_mode):o}); run `chmod 700 {directory}`"
        )
    return directory


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a cache directory among processes; it is let go with the process that holds it.

    Raises:
        CacheDirError: nothing can be written there.
    """
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise not_writable(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def not_writable(directory: Path, error: OSError) -> CacheDirError:
    """What to say when writing to a cache directory fails."""
    return CacheDirError(
        f"the cache directory {directory} cannot be written ({error.strerror or error}); "
        "set TOKENTIGHT_CACHE_DIR to a writable directory of your own"
    )


def _root() -> Path:
    own = os.environ.get("TOKENTIGHT_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "tokentight"
    try:
        return Path.home() / ".cache" / "tokentight"
    except RuntimeError as error:
        raise CacheDirError(
            "there is no home directory for a cache; set TOKENTIGHT_CACHE_DIR to a directory of "
            "your own"
        ) from error
