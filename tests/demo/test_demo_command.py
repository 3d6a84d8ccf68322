"""The demo as a command, from starting the server to the verdict, on a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_served_model import save_tiny_model

REQUESTS = 8


@pytest.mark.integration
def test_it_reports_equal_answers_from_two_real_stages(tmp_path: Path) -> None:
    config = save_tiny_model(tmp_path) / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"max_position_embeddings": 2048}))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "tokentight", "demo", str(tmp_path)),
            *("-pp", "2", "--requests", str(REQUESTS), "--json"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["requests"], document["identical"]) == (REQUESTS, REQUESTS)
    assert document["differences"] == []
    assert document["quiet"]["output_tokens"] == document["loaded"]["output_tokens"] > REQUESTS


@pytest.mark.integration
def test_a_model_that_does_not_start_is_said_with_the_servers_words() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tokentight", "demo", "./no-such-model"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert "no-such-model" in result.stderr
    assert "Traceback" not in result.stderr
