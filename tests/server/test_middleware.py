"""Request ids, API keys, probes and what the log says."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fake_engine import FakeEngine
from running_service import RunningService, running_service

import tokentight
from tokentight.server.config import ServerConfig
from tokentight.server.engine_api import EngineStatus
from tokentight.server.request_log import LOG_FORMAT, RequestIdFilter

COMPLETIONS = "/v1/completions"


def test_a_request_id_is_returned_on_every_answer(service: RunningService) -> None:
    for path in ("/health", "/nothing", COMPLETIONS):
        response = service.client.get(path, headers={"X-Request-Id": "abc 1"})
        assert response.headers["x-request-id"] == "abc 1"
    response = service.client.post(
        COMPLETIONS, json={"prompt": "a", "stream": True}, headers={"X-Request-Id": "s"}
    )
    assert response.headers["x-request-id"] == "s"


@pytest.mark.parametrize("given", [b"", b"a" * 129, b"\xff", b"a\tb"])
def test_an_unfit_request_id_is_replaced(service: RunningService, given: bytes) -> None:
    response = service.client.get("/health", headers={b"X-Request-Id": given})
    got = response.headers["x-request-id"]
    assert got.isascii()
    assert len(got) == 32


def test_two_requests_with_one_id_do_not_collide(serve: Any) -> None:
    engine = FakeEngine()
    service = serve(engine)
    headers = {"X-Request-Id": "same"}
    ids = {
        service.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers).json()["id"]
        for _ in range(2)
    }
    assert len(ids) == 2
    assert len({request.request_id for request in engine.submitted}) == 2


def test_every_log_line_has_the_request_id_and_none_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.handler.addFilter(RequestIdFilter())
    caplog.handler.setFormatter(logging.Formatter(LOG_FORMAT))
    caplog.set_level(logging.DEBUG, logger="tokentight")

    async def started() -> FakeEngine:
        return FakeEngine(fails_with="a failure to be logged")

    config = ServerConfig(port=0, api_keys=("sesame-open",))
    with running_service(started, config) as service:
        headers = {"X-Request-Id": "log-me", "Authorization": "Bearer sesame-open"}
        path = f"{COMPLETIONS}?key=sesame-open"
        service.client.post(path, json={"prompt": "a", "stream": True}, headers=headers)
        wrong = {**headers, "Authorization": "Bearer sesame-shut"}
        service.client.post(COMPLETIONS, json={"prompt": "a"}, headers=wrong)
    lines = [line for line in caplog.text.splitlines() if "tokentight.server" in line]
    assert len(lines) == 3
    assert all("[log-me]" in line for line in lines)
    assert "sesame" not in caplog.text
    assert "sesame" not in repr(config)


@pytest.mark.parametrize(
    "authorization", [None, "sesame", "Bearer", "Bearer wrong", "Basic sesame", "é"]
)
def test_401_without_a_key(serve: Any, authorization: str | None) -> None:
    service = serve(FakeEngine(), api_keys=("sesame", "second"))
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("POST", "/tokenize")):
        response = service.client.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert service.client.get(path).status_code == 200
    for key in ("sesame", "second"):
        headers = {"Authorization": f"Bearer {key}"}
        assert service.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("status", "health", "ready"),
    [
        (EngineStatus.STARTING, 200, 503),
        (EngineStatus.READY, 200, 200),
        (EngineStatus.RECOVERING, 200, 503),
        (EngineStatus.DRAINING, 200, 503),
        (EngineStatus.DEAD, 503, 503),
    ],
)
def test_health_and_ready_tell_the_state(
    serve: Any, status: EngineStatus, health: int, ready: int
) -> None:
    engine = FakeEngine()
    service = serve(engine)
    engine.status, engine.status_detail = status, "because"
    for path, expected in (("/health", health), ("/ready", ready)):
        response = service.client.get(path)
        assert response.status_code == expected
        assert response.json() == {"status": status.value, "detail": "because"}


def test_version_models_and_openapi(serve: Any) -> None:
    service = serve(FakeEngine(), served_model_names=("org/name", "other"))
    assert service.client.get("/version").json() == {"version": tokentight.__version__}
    cards = service.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["org/name", "other"]
    assert cards[0]["max_model_len"] == 512
    assert service.client.get("/v1/models/org/name").json() == cards[0]
    schema = service.client.get("/openapi.json").json()
    assert "CompletionRequest" in schema["components"]["schemas"]


def test_metrics_count_what_was_served(serve: Any) -> None:
    service = serve(FakeEngine(), served_model_names=("m",))
    service.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5, "n": 2})
    service.client.post(COMPLETIONS, json={"prompt": "a", "stop": ".", "max_tokens": 200})
    text = service.client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def value(name: str, labels: str = "") -> float:
        return float(values[f'tokentight:{name}{{{labels}model_name="m"}}'])

    assert value("request_success_total", 'finished_reason="length",') == 2
    assert value("request_success_total", 'finished_reason="stop",') == 1
    assert value("time_to_first_token_seconds_count") == 3
    assert value("e2e_request_latency_seconds_count") == 3
    assert value("inter_token_latency_seconds_count") >= 2
    assert value("kv_cache_usage_perc") == 0.25
    assert value("num_preemptions_total") == 1
    assert value("stage_restarts_total") == 3
    assert value("audit_violations_total") == 0
    for name in ("num_requests_running", "num_requests_waiting"):
        assert value(name) == 0
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"):
        assert value(f"{name}_total") >= 0
