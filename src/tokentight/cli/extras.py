"""Optional dependencies: a command that lacks its own says which extra brings them."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")

EXIT_MISSING_EXTRA = 69
"""`EX_UNAVAILABLE` of sysexits.h: a needed program or file does not exist."""

_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def extra_distributions(extra: str) -> list[str]:
    """Names of the distributions that `tokentight[extra]` asks for, as its metadata lists them.

    Empty when tokentight runs from a source tree without being installed.
    """
    try:
        lines = importlib.metadata.requires("tokentight") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    names = []
    for line in lines:
        marker = _EXTRA.search(line)
        name = _PROJECT.match(line)
        if marker and name and marker.group(1) == extra:
            names.append(name.group(0))
    return names


def missing_distributions(extra: str) -> list[str]:
    """Those of the extra's distributions that are not installed."""
    return [name for name in extra_distributions(extra) if not _installed(name)]


def needs(extra: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a command say in one line which extra it lacks, and exit with 69."""

    def decorate(command: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(command)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            missing = missing_distributions(extra)
            if missing:
                name = getattr(command, "__name__", "this command").replace("_", "-")
                typer.echo(
                    f"tokentight {name} needs {', '.join(missing)}: "
                    f"pip install 'tokentight[{extra}]'",
                    err=True,
                )
                raise typer.Exit(EXIT_MISSING_EXTRA)
            return command(*args, **kwargs)

        return checked

    return decorate


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
