"""A command whose extra is missing says which one, in one line."""

from __future__ import annotations

import importlib.metadata

import pytest
import typer
from typer.testing import CliRunner

from tokentight.cli.extras import EXIT_MISSING_EXTRA, extra_distributions, missing_distributions
from tokentight.cli.extras import needs as needs_extra

REQUIREMENTS = [
    "numpy>=1.26",
    "present>=1 ; extra == 'engine'",
    'absent>=2; extra == "engine"',
    "other ; extra == 'dev'",
]


@pytest.fixture(autouse=True)
def metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "present":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "requires", lambda _: REQUIREMENTS)
    monkeypatch.setattr(importlib.metadata, "version", version)


def run(extra: str, arguments: list[str]) -> tuple[int, str, str]:
    app = typer.Typer()

    def say_hello(name: str) -> None:
        typer.echo(f"hello {name}")

    app.command()(needs_extra(extra)(say_hello))
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_the_extras_distributions_are_those_of_the_metadata() -> None:
    assert extra_distributions("engine") == ["present", "absent"]
    assert missing_distributions("engine") == ["absent"]


def test_a_missing_extra_is_named_in_one_line() -> None:
    code, out, err = run("engine", ["you"])
    assert (code, out) == (EXIT_MISSING_EXTRA, "")
    assert err == "tokentight say-hello needs absent: pip install 'tokentight[engine]'\n"


def test_a_command_whose_extra_is_there_keeps_its_arguments() -> None:
    assert run("none", ["you"]) == (0, "hello you\n", "")


def test_a_source_tree_that_is_not_installed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert run("engine", ["you"]) == (0, "hello you\n", "")
