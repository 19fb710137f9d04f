"""`EngineArgs`: the flat form of the configuration, as flags or keywords, and its way into `VllmConfig`. Layer: L1."""

from __future__ import annotations

import argparse
import dataclasses
import json
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar, cast

from vllm import envs, platforms
from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.device import DeviceConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.model import DEFAULT_MODEL, ModelConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import EXECUTOR_BACKENDS, ParallelConfig
from vllm.config.refusals import refuse_unserved
from vllm.config.scheduler import SchedulerConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.config.vllm import VllmConfig
from vllm.engine.arg_defaults import default_limits
from vllm.engine.arg_table import ArgSpec, add_flag, build_table
from vllm.engine.arg_unsupported import check_unsupported
from vllm.logger import init_logger
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext

logger = init_logger(__name__)

T = TypeVar("T")
TABLE: Final = build_table()


def _fields_from_table(cls: type[T]) -> type[T]:
    """Class decorator: a dataclass with one field per line of the table, `model` first."""
    for spec in TABLE.values():
        cls.__annotations__[spec.name] = Any
        factory = spec.default_factory
        value = dataclasses.field(default_factory=factory) if factory is not None else spec.default
        if isinstance(value, dict | list):
            value = dataclasses.field(default_factory=partial(copy, value))
        setattr(cls, spec.name, value)
    return dataclasses.dataclass(cls)


@_fields_from_table
class EngineArgs:
    """All settings of an engine, flat. A field has the name of its flag; None means that the default is derived.

    Values may be config objects or the dicts they are made of. Nothing is checked before `create_engine_config`.
    """

    model: str = DEFAULT_MODEL

    if TYPE_CHECKING:
        # The fields come from the table; each holds whatever its config field accepts.
        def __init__(self, model: str = ..., **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Declare every flag on `parser`, grouped by concern."""
        groups: dict[str, argparse._ArgumentGroup] = {}
        for spec in TABLE.values():
            if spec.group not in groups:
                groups[spec.group] = parser.add_argument_group(spec.group)
            add_flag(groups[spec.group], spec)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From parsed flags; flags that are not of the engine are ignored."""
        given = vars(args)
        return cls(**{name: given[name] for name in TABLE if name in given})

    def create_engine_config(self, usage_context: UsageContext | None = None) -> VllmConfig:
        """Build the configuration. Raises ValueError (with the field's name) for anything that cannot work."""
        _check_environment(fail=self.fail_on_environ_validation)
        load_general_plugins()
        check_unsupported(vars(self))
        model = ModelConfig(**self._values_of(ModelConfig))
        if model.runner_type != "generate" or model.convert not in ("auto", "none"):
            raise ValueError(
                f"runner={model.runner!r}, convert={model.convert!r}: this engine serves generation only"
            )
        parallel = ParallelConfig(**self._values_of(ParallelConfig))
        _check_parallel(parallel, self.data_parallel_rank)
        if self.mamba_cache_mode is not None:
            logger.warning_once("--mamba-cache-mode is deprecated and has no effect")
        cache_values = self._values_of(CacheConfig)
        cache_values.pop("mamba_cache_mode", None)
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(**cache_values),
            parallel_config=parallel,
            scheduler_config=self._scheduler_config(model, parallel, usage_context),
            device_config=DeviceConfig(),
            load_config=LoadConfig(**self._values_of(LoadConfig)),
            attention_config=self._part(AttentionConfig, "attention_config"),
            structured_outputs_config=self._part(StructuredOutputsConfig, "structured_outputs_config"),
            observability_config=ObservabilityConfig(**self._values_of(ObservabilityConfig)),
            kv_transfer_config=_as_config(KVTransferConfig, self.kv_transfer_config, "kv_transfer_config"),
            kv_events_config=_as_config(KVEventsConfig, self.kv_events_config, "kv_events_config"),
            additional_config=self.additional_config,
            shutdown_timeout=self.shutdown_timeout,
        )
        refuse_unserved(config)
        return config

    def _values_of(self, config_class: type[Any]) -> dict[str, Any]:
        """Constructor keywords for `config_class`; fields that are to be derived are left out."""
        values: dict[str, Any] = {}
        for spec in TABLE.values():
            value = vars(self)[spec.name]
            if (
                spec.group == config_class.__name__
                and spec.target
                and not (spec.flag.unset and value is None)
            ):
                values[spec.target] = value
        return values

    def _part(self, config_class: type[T], name: str) -> T:
        """A part that can be given as a whole, with single fields that were given on their own laid over it."""
        whole = _as_config(config_class, vars(self)[name], name) or config_class()
        for spec in TABLE.values():
            if spec.group == config_class.__name__ and spec.target and vars(self)[spec.name] != spec.default:
                setattr(whole, spec.target, vars(self)[spec.name])
        return whole

    def _scheduler_config(
        self, model: ModelConfig, parallel: ParallelConfig, usage_context: UsageContext | None
    ) -> SchedulerConfig:
        values = self._values_of(SchedulerConfig)
        limits = default_limits(platforms.current_platform, usage_context, parallel.world_size)
        chunked = values.get("enable_chunked_prefill", True)
        max_model_len = cast(int, model.max_model_len)
        if "max_num_batched_tokens" not in values:
            values["max_num_batched_tokens"] = limits.tokens if chunked else max(limits.tokens, max_model_len)
        if "max_num_seqs" not in values:
            # At least 1: a fault of the given value is told under the name that was given.
            values["max_num_seqs"] = max(1, min(limits.seqs, values["max_num_batched_tokens"]))
        return SchedulerConfig(
            max_model_len=max_model_len,
            is_encoder_decoder=model.is_encoder_decoder,
            runner_type=model.runner_type,
            is_multimodal_model=model.is_multimodal_model,
            **values,
        )


@_fields_from_table
class AsyncEngineArgs(EngineArgs):
    """The same for the server; `enable_log_requests` logs each request as it arrives."""

    model: str = DEFAULT_MODEL
    enable_log_requests: bool = False

    FRONT_END_FIELDS: ClassVar[tuple[str, ...]] = ("enable_log_requests",)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From parsed flags; flags that are not of the engine are ignored."""
        given = vars(args)
        return cls(**{name: given[name] for name in (*TABLE, *cls.FRONT_END_FIELDS) if name in given})


def _as_config(config_class: type[T], value: Any, name: str) -> T | None:
    """A config object from itself, a mapping or JSON text. Raises ValueError naming the flag."""
    if value is None or isinstance(value, config_class):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} must be a JSON object")
    try:
        return config_class(**value)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_environment(fail: bool) -> None:
    for name, near in envs.unknown_variables().items():
        hint = f"; did you mean {near}?" if near else ""
        if fail:
            raise ValueError(f"Unknown environment variable {name}{hint}")
        logger.warning_once("Unknown environment variable %s%s", name, hint)
    for name, reason in envs.unused_variables().items():
        logger.warning_once("Environment variable %s has no effect: %s", name, reason)


def _check_parallel(parallel: ParallelConfig, given_rank: int | None) -> None:
    if parallel.data_parallel_size > 1 and given_rank is not None:
        raise ValueError(
            f"data_parallel_rank={given_rank} is not supported with data_parallel_size={parallel.data_parallel_size}: "
            "one server starts all replicas and chooses among them"
        )
    refused = ["prefill_context_parallel_size", "decode_context_parallel_size"]
    if parallel.distributed_executor_backend in (None, *EXECUTOR_BACKENDS):
        refused.append("pipeline_parallel_size")  # an executor from outside may have stages
    for name in refused:
        size: int = vars(parallel)[name]
        if size > 1:
            raise ValueError(
                f"{name}={size} is not supported: only tensor_parallel_size and data_parallel_size may exceed 1"
            )


__all__ = ["AsyncEngineArgs", "EngineArgs", "ArgSpec", "TABLE"]
