"""A progress bar while the model loads; quiet where standard error is not a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn


@contextlib.contextmanager
def loading_bar() -> Iterator[Callable[[int, int, int], None]]:
    """Yields `progress(stage_index, done, total)`, with a bar for each stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        tasks: dict[int, TaskID] = {}

        def progress(stage_index: int, done: int, total: int) -> None:
            if stage_index not in tasks:
                label = f"loading stage {stage_index + 1}"
                tasks[stage_index] = bars.add_task(label, total=total)
            bars.update(tasks[stage_index], completed=done)

        yield progress
