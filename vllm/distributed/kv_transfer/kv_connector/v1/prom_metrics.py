"""Base of the metric sinks that connectors bring along.

Owns the construction of metrics from classes that are handed in. It must not import a metrics
library nor any connector. Layer L4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource


def share_metrics(metric_types: Mapping[Any, Any]) -> dict[Any, Callable[..., Any]]:
    """The same classes for several sinks: a name that two of them use stands for one metric."""
    made: dict[str, Any] = {}

    def make(wanted: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        name = fields["name"] if "name" in fields else args[0]
        if name not in made:
            made[name] = wanted(*args, **fields)
        return made[name]

    return {library_class: partial(make, wanted) for library_class, wanted in metric_types.items()}


class KVConnectorPromMetrics:
    """Turns the statistics payload of one connector into metrics.

    ``metric_types`` maps the metric library's classes (gauge, counter, histogram) to the classes to
    instantiate; all four arguments are the library's and the front end's own, hence opaque here.
    """

    hit_tiers: frozenset[CacheHitSource] = frozenset()
    """Tiers whose hits are shown."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._metric_types = metric_types
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues
        self.wants_reports = False
        """Whether figures change without a step of the engine, so that it is to be asked now and then."""

    def make_metric(
        self, library_class_name: str, name: str, documentation: str, labels: list[str], **more: Any
    ) -> Any:
        """Instantiate the metric class standing in for the library class of that name, with ``more`` arguments of its own.

        ``KeyError`` if the front end did not offer such a class.
        """
        for library_class, wanted in self._metric_types.items():
            if library_class.__name__ == library_class_name:
                return wanted(name=name, documentation=documentation, labelnames=labels, **more)
        raise KeyError(f"no metric class named {library_class_name!r} was handed in")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's payload. The base ignores it."""

    def observe_report(self, report: Mapping[str, Any], engine_idx: int = 0) -> None:
        """What an engine's cache holds now: the fields of `KVCacheReport`. The base ignores it."""

    def observe_hits(self, tokens_by_source: Mapping[CacheHitSource, int], engine_idx: int = 0) -> None:
        """Cached tokens that requests have reported, of `hit_tiers` only. The base ignores it."""
