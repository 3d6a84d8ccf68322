"""How the demonstration looks in a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tokentight.demo.comparison import Comparison

NUM_SHOWN = 6
MAX_SHOWN_DIFFERENCES = 10


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on `console`, or one line per phase where it is not a terminal."""
    if not console.is_terminal:
        seen: set[str] = set()

        def announce(label: str, done: int, total: int) -> None:  # noqa: ARG001
            if label not in seen:
                seen.add(label)
                console.print(label, highlight=False)

        yield announce
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        tasks: dict[str, object] = {}

        def advance(label: str, done: int, total: int) -> None:
            if label not in tasks:
                for task in bars.tasks:
                    bars.remove_task(task.id)
                tasks[label] = bars.add_task(label, total=total or None)
            bars.update(bars.tasks[-1].id, completed=done)

        yield advance


def show(comparison: Comparison, console: Console) -> None:
    """Some of the answers, the throughput of both passes, and the verdict."""
    console.print(_answers(comparison))
    console.print(_throughput(comparison))
    total, differences = len(comparison.asked), comparison.differences
    if not differences:
        console.print(
            f"[bold green]{total} of {total} answers are the same[/] alone and with "
            f"{comparison.loaded.concurrency} at once: token ids and logprobs, bit by bit."
        )
        return
    console.print(f"[bold red]{len(differences)} of {total} answers differ[/] under load:")
    for difference in differences[:MAX_SHOWN_DIFFERENCES]:
        what = ", ".join(difference.what)
        console.print(f"  request {difference.index}, {what}: {escape(difference.title)}")
    if len(differences) > MAX_SHOWN_DIFFERENCES:
        console.print(f"  and {len(differences) - MAX_SHOWN_DIFFERENCES} more")


def _answers(comparison: Comparison) -> Table:
    table = Table(title="Some of the answers under load", title_justify="left", show_lines=True)
    table.add_column("question", ratio=2)
    table.add_column("answer", ratio=3)
    table.add_column("same as alone", justify="center", no_wrap=True)
    differing = {difference.index for difference in comparison.differences}
    for index in range(min(NUM_SHOWN, len(comparison.asked))):
        table.add_row(
            escape(comparison.asked[index].title),
            escape(comparison.loaded.answers[index].text.strip()),
            "[red]no[/]" if index in differing else "[green]yes[/]",
        )
    return table


def _throughput(comparison: Comparison) -> Table:
    stages = comparison.stages
    title = f"{comparison.model}, {stages} {'stage' if stages == 1 else 'stages'}"
    table = Table(title=title, title_justify="left")
    for column in ("sent at once", "computed at once", "tokens", "seconds", "tokens/s", "ratio"):
        table.add_column(column, justify="right")
    for measured, ratio in ((comparison.quiet, 1.0), (comparison.loaded, comparison.speedup)):
        table.add_row(
            str(measured.concurrency),
            str(measured.peak_running),
            str(measured.num_output_tokens),
            f"{measured.seconds:.1f}",
            f"{measured.tokens_per_second:.1f}",
            f"{ratio:.1f}",
        )
    return table
