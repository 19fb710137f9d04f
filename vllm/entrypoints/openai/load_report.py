"""The engine's load in a reply's header, for load balancers: an ORCA load report of what `/metrics` shows. Layer: L8.

A request asks for it with `endpoint-load-metrics-format: text` or `json`. Nothing is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry

from vllm.entrypoints.openai.middleware import App, Message, Receive, Scope, Send, header_of

FORMAT_HEADER: Final = b"endpoint-load-metrics-format"
REPORT_HEADER: Final = b"endpoint-load-metrics"
COUNTS: Final = ("num_requests_running", "num_requests_waiting")
SHARES: Final = ("kv_cache_usage_perc",)


def read_load(registry: CollectorRegistry = REGISTRY) -> dict[str, float]:
    """Requests of all engines together, and the mean of their shares from 0 to 1; empty without statistics."""
    names = [f"vllm:{name}" for name in (*COUNTS, *SHARES)]
    values: dict[str, list[float]] = {}
    for metric in registry.restricted_registry(names).collect():
        for sample in metric.samples:
            values.setdefault(sample.name.removeprefix("vllm:"), []).append(sample.value)
    load = {name: sum(values[name]) for name in COUNTS if name in values}
    return load | {name: sum(values[name]) / len(values[name]) for name in SHARES if name in values}


def _as_text(load: Mapping[str, float]) -> str:
    return "TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in load.items())


def _as_json(load: Mapping[str, float]) -> str:
    return "JSON " + json.dumps({"named_metrics": dict(load)})


FORMATS: Final[Mapping[str, Callable[[Mapping[str, float]], str]]] = {"text": _as_text, "json": _as_json}


class LoadReportMiddleware:
    """Adds `endpoint-load-metrics` to replies whose request asks for it in a format that there is."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = header_of(scope, FORMAT_HEADER) if scope["type"] == "http" else None
        as_format = None if wanted is None else FORMATS.get(wanted.strip().lower())
        if as_format is None:
            await self.app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start" and (load := read_load()):
                report = as_format(load).encode("ascii")
                message["headers"] = [*message.get("headers", ()), (REPORT_HEADER, report)]
            await send(message)

        await self.app(scope, receive, send_with_load)
