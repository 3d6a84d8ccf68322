"""Prometheus metrics: vLLM's names and meanings under `tokentight:`."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokentight.server.engine_api import FinishReason, RequestOutput, ServingEngine

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class ServerMetrics:
    """What `/metrics` shows of one service. A registry of its own, so that services do not mix."""

    def __init__(self, engine: ServingEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first output token.",
            _TTFT_BUCKETS,
            model_name,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "From one output token of a request to its next.",
            _INTER_TOKEN_BUCKETS,
            model_name,
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds",
            "From a request's arrival to its end.",
            _LATENCY_BUCKETS,
            model_name,
        )
        success = Counter(
            "tokentight:request_success",
            "Requests that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self.finished = {
            reason: success.labels(model_name, reason.value) for reason in FinishReason
        }

    def _histogram(
        self, name: str, meaning: str, buckets: tuple[float, ...], model_name: str
    ) -> Histogram:
        return Histogram(
            f"tokentight:{name}",
            meaning,
            ("model_name",),
            buckets=buckets,
            registry=self._registry,
        ).labels(model_name)

    def start_request(self) -> RequestTimer:
        return RequestTimer(self, time.monotonic())

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class RequestTimer:
    """Latencies of one engine request, seen where its outputs are taken."""

    def __init__(self, metrics: ServerMetrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last_token: float | None = None
        self._finished = False

    def took(self, output: RequestOutput, now: float) -> None:
        """Several tokens in one output share the time since the last one equally."""
        num_tokens = len(output.token_ids)
        if num_tokens == 0:
            return
        if self._last_token is None:
            self._metrics.time_to_first_token.observe(now - self._arrival)
        else:
            for _ in range(num_tokens):
                self._metrics.inter_token_latency.observe((now - self._last_token) / num_tokens)
        self._last_token = now

    def finished(self, reason: FinishReason) -> None:
        if not self._finished:
            self._finished = True
            self._metrics.e2e_request_latency.observe(time.monotonic() - self._arrival)
            self._metrics.finished[reason].inc()


class _EngineCollector(Collector):
    """The engine's own counts, read when they are asked for."""

    def __init__(self, engine: ServingEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for name, value, meaning in (
            ("num_requests_running", stats.num_requests_running, "Requests being computed."),
            ("num_requests_waiting", stats.num_requests_waiting, "Requests in the queue."),
            ("kv_cache_usage_perc", stats.kv_cache_usage, "KV cache in use; 1 is all of it."),
        ):
            gauge = GaugeMetricFamily(f"tokentight:{name}", meaning, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge
        for name, count, meaning in (
            ("num_preemptions", stats.num_preemptions, "Requests preempted for KV blocks."),
            ("prompt_tokens", stats.prompt_tokens, "Prompt tokens prefilled."),
            ("generation_tokens", stats.generation_tokens, "Output tokens generated."),
            (
                "prefix_cache_queries",
                stats.prefix_cache_queries,
                "Prompt tokens looked up in the prefix cache.",
            ),
            ("prefix_cache_hits", stats.prefix_cache_hits, "Prompt tokens found there."),
            (
                "audit_violations",
                stats.audit_violations,
                "Step plans that disagreed with the ledger and were stopped.",
            ),
            ("stage_restarts", stats.stage_restarts, "Stage processes started again."),
        ):
            counter = CounterMetricFamily(f"tokentight:{name}", meaning, labels=("model_name",))
            counter.add_metric((self._model_name,), count)
            yield counter
