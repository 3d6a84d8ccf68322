"""Settings that cannot work are refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from tokentight.server.config import ServerConfig, ServerConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("served_model_names", ("a", "")),
        ("max_body_bytes", 0),
        ("max_choices", 0),
        ("client_timeout_s", 0.0),
        ("client_timeout_s", float("inf")),
        ("drain_timeout_s", float("nan")),
    ],
)
def test_what_cannot_work_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ServerConfigError, match=name):
        ServerConfig(**{name: value})


@pytest.mark.parametrize("key", ["", "a\nb", "é"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(ServerConfigError, match="API key") as refused:
        ServerConfig(api_keys=(key,))
    assert not key or key not in str(refused.value)
