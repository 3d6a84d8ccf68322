"""The command line's promises: exit codes, quick and bare help, one entry for both spellings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import tokentight
from tokentight.cli.main import EXIT_USAGE, app

HEAVY = ("torch", "transformers", "fastapi", "zmq", "numba", "scipy")


def test_version_names_the_package_and_its_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"tokentight {tokentight.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_says_what_it_is_and_names_the_commands(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    for word in ("do not depend on load", "serve", "demo", "tokentight serve smollm2-135m"):
        assert word in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-option"],
        ["no-such-command"],
        ["serve"],
        ["serve", "model", "--no-such-option"],
        ["serve", "model", "--port", "many"],
        ["demo", "--requests", "1"],
    ],
)
def test_usage_errors_exit_with_64(arguments: list[str]) -> None:
    """2, the command-line library's own code, is kept for a verdict."""
    assert CliRunner().invoke(app, arguments).exit_code == EXIT_USAGE


def test_the_command_line_imports_nothing_heavy() -> None:
    """Help must be quick, and must work on a bare install."""
    script = (
        "import json, sys, tokentight.cli.main; "
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == []


def test_python_m_tokentight_is_the_same_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tokentight", "no-such-command"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == EXIT_USAGE
    assert "Usage: tokentight" in result.stderr
