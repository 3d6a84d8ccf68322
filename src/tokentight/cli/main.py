"""The command line: `tokentight COMMAND`.

The modules of the commands import nothing heavy at module level, so that `tokentight --help` is
quick and works on a bare install; what a command needs is imported when it runs.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tokentight
from tokentight.cli.demo import demo
from tokentight.cli.extras import needs
from tokentight.cli.serve import serve

EXIT_USAGE = 64
"""`EX_USAGE` of sysexits.h. Not the 2 of the command-line library: that is a verdict's."""

# The parent of BadParameter under every version of the library, which carries its own click or
# not depending on that version.
_UsageError: Any = typer.BadParameter.__mro__[1]

HELP = """
LLM serving whose answers do not depend on load: nothing swallowed, nothing duplicated, nothing
leaked.

A request gets the same tokens and the same logprobs, bit for bit, whether it runs alone or among
hundreds: however its prompt was chunked, whether its prefix came from the cache, after a
preemption, with any number of pipeline stages.

Examples:

    tokentight demo                        see it on a real model

    tokentight serve smollm2-135m          an OpenAI-compatible API on port 8000

    tokentight serve ./Qwen3-8B -pp 2      its layers split over two processes

Exit codes: 0 success, 1 failure, 64 a mistake in the command line, 69 an optional dependency is
not installed (the message names it).
"""


class Commands(TyperGroup):
    """Usage errors exit with 64, wherever in the command line they are found."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except _UsageError as error:
            error.exit_code = EXIT_USAGE
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            error.exit_code = EXIT_USAGE
            raise


app = typer.Typer(
    name="tokentight",
    cls=Commands,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokentight {tokentight.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("serve")(needs("engine")(serve))
app.command("demo")(needs("engine")(demo))


def run() -> None:
    """Entry point of the `tokentight` command."""
    app(prog_name="tokentight")
