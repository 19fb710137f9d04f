"""Where the counters go: the log line, and the manager that feeds all sinks.  Layer L7.

Owns the intervals and rates of the log line. Must not know requests or the core. A sink that fails is reported once and
never disturbs what it measures.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.logger import init_logger
from vllm.plugins import load_plugins_by_group
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.metrics.prometheus import PrometheusMetrics
from vllm.v1.metrics.stats import KV_FETCH_STAGES, CachingMetrics, IterationStats, SchedulerStats

logger = init_logger(__name__)

STAT_LOGGER_PLUGINS = "vllm.stat_logger_plugins"


class StatLoggerBase(ABC):
    """A sink for the statistics of one engine."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        """Take one step's figures."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """The engine is ready."""

    def log(self) -> None:
        """An interval has passed."""
        return

    def record_sleep_state(self, level: int) -> None:
        """The engine fell asleep (level 1 or 2) or woke up (0)."""
        return


StatLoggerFactory = Callable[[VllmConfig, int], StatLoggerBase]


class LoggingStatLogger(StatLoggerBase):
    """One line per interval: INFO while something happens, DEBUG while nothing does."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0, clock: Clock | None = None) -> None:
        self.engine_index = engine_index
        self._vllm_config = vllm_config
        self._device = (vllm_config.device_config.device_type or "device").upper()
        self._clock = clock or MonotonicClock()
        self._last_stats = SchedulerStats()
        self._prefix_cache = CachingMetrics()
        self._external_cache = CachingMetrics()
        self._connector = KVConnectorLogging(vllm_config.kv_transfer_config)
        self._was_active = False
        self._start_interval()

    def _start_interval(self) -> None:
        self._started = self._clock.monotonic()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._preemptions = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._prompt_tokens += iteration_stats.num_computed_prompt_tokens
            self._generation_tokens += iteration_stats.num_generation_tokens
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self._last_stats = scheduler_stats
            self._prefix_cache.observe(scheduler_stats.prefix_cache_stats)
            if scheduler_stats.connector_prefix_cache_stats is not None:
                self._external_cache.observe(scheduler_stats.connector_prefix_cache_stats)
            if scheduler_stats.kv_connector_stats:
                self._connector.observe(scheduler_stats.kv_connector_stats)

    def log(self) -> None:
        active = bool(self._prompt_tokens or self._generation_tokens)
        write = logger.info if active or self._was_active else logger.debug
        self._was_active = active
        write("Engine %03d: %s", self.engine_index, ", ".join(self._parts()))
        self._connector.log(write)
        self._start_interval()

    def _parts(self) -> Iterable[str]:
        stats = self._last_stats
        seconds = max(self._clock.monotonic() - self._started, 1e-9)
        yield f"Avg prompt throughput: {self._prompt_tokens / seconds:.1f} tokens/s"
        yield f"Avg generation throughput: {self._generation_tokens / seconds:.1f} tokens/s"
        yield f"Running: {stats.num_running_reqs} reqs"
        yield f"Waiting: {stats.num_waiting_reqs} reqs"
        if stats.num_skipped_waiting_reqs:
            yield f"Deferred: {stats.num_skipped_waiting_reqs} reqs"
        if any(stats.num_kv_fetch_reqs_by_stage.values()):
            stages = (
                f"{stats.num_kv_fetch_reqs_by_stage.get(stage, 0)} {stage.replace('_', ' ')}"
                for stage in KV_FETCH_STAGES
            )
            yield f"KV fetch: {', '.join(stages)}"
        if self._preemptions:
            yield f"Preemptions: {self._preemptions}"
        yield f"{self._device} KV cache usage: {stats.kv_cache_usage * 100:.1f}%"
        if not self._prefix_cache.empty:
            yield f"Prefix cache hit rate: {self._prefix_cache.hit_rate * 100:.1f}%"
        if not self._external_cache.empty:
            yield f"External prefix cache hit rate: {self._external_cache.hit_rate * 100:.1f}%"

    def log_engine_initialized(self) -> None:
        cache = self._vllm_config.cache_config
        if cache.num_gpu_blocks:
            logger.info(
                "Engine %03d: %d KV cache blocks of %s tokens.",
                self.engine_index,
                cache.num_gpu_blocks,
                cache.block_size,
            )


class StatLoggerManager:
    """Feeds the log line, Prometheus and any further sinks of all engines of a front end.

    `resolved`: per engine, the fields of its cache configuration that it has decided for itself.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_idxs: list[int],
        custom_stat_loggers: list[StatLoggerFactory] | None = None,
        clock: Clock | None = None,
        resolved: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._resolved = resolved
        self._last_log = self._clock.monotonic()
        self._failed: set[str] = set()
        self.prometheus = PrometheusMetrics(vllm_config, engine_idxs)
        factories: list[StatLoggerFactory] = [
            LoggingStatLogger,
            *(custom_stat_loggers or ()),
            *load_plugins_by_group(STAT_LOGGER_PLUGINS).values(),
        ]
        self.per_engine: dict[int, list[StatLoggerBase]] = {
            index: [factory(self._config_of(vllm_config, index), index) for factory in factories]
            for index in engine_idxs
        }

    def _config_of(self, vllm_config: VllmConfig, index: int) -> VllmConfig:
        if index >= len(self._resolved):
            return vllm_config
        config = copy.copy(vllm_config)
        config.cache_config = copy.copy(vllm_config.cache_config)
        vars(config.cache_config).update(self._resolved[index])
        return config

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
        rejections: dict[str, int] | None = None,
    ) -> None:
        """Take one step's figures. Never raises."""
        self._guard(
            "prometheus", lambda: self.prometheus.record(scheduler_stats, iteration_stats, engine_idx)
        )
        if rejections is not None:
            self._guard("prometheus", lambda: self.prometheus.record_rejections(rejections))
        for sink in self.per_engine.get(engine_idx, ()):
            self._guard(
                type(sink).__name__, partial(sink.record, scheduler_stats, iteration_stats, engine_idx)
            )

    def record_sleep_state(self, level: int) -> None:
        """The engines fell asleep (level 1 or 2) or woke up (0). Never raises."""
        self._guard("prometheus", lambda: self.prometheus.record_sleep_state(level))
        self._each(lambda sink: sink.record_sleep_state(level))

    def log(self) -> None:
        """Write the interval's line. Never raises."""
        self._last_log = self._clock.monotonic()
        self._each(lambda sink: sink.log())

    def log_if_due(self) -> None:
        """Write it if VLLM_LOG_STATS_INTERVAL seconds have passed since the last one."""
        if self._clock.monotonic() - self._last_log >= envs.VLLM_LOG_STATS_INTERVAL:
            self.log()

    def log_engine_initialized(self) -> None:
        """The engines are ready. Never raises."""
        self._guard("prometheus", lambda: self.prometheus.record_cache_config(self._resolved))
        self._each(lambda sink: sink.log_engine_initialized())

    def close(self) -> None:
        """Give the metric names free again."""
        self.prometheus.unregister()

    def _each(self, action: Callable[[StatLoggerBase], None]) -> None:
        for sinks in self.per_engine.values():
            for sink in sinks:
                self._guard(type(sink).__name__, partial(action, sink))

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            if name not in self._failed:
                self._failed.add(name)
                logger.exception("Statistics sink %s failed; further failures of it are not logged.", name)
