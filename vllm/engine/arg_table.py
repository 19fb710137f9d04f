"""The flags of the engine, derived from the declarations of the config classes. Layer: L1.

One `ArgSpec` per field of `EngineArgs`: where it goes, its default, how its text is parsed, its doc.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.setting import PLAIN, Flag, setting_info
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.config.vllm import VllmConfig
from vllm.engine.arg_unsupported import UNSUPPORTED
from vllm.utils.argparse_utils import human_readable_int, json_value

# Config classes whose fields are flags of their own, in the order of the help page. VllmConfig's parts that are given
# as a whole (JSON) follow.
CONFIG_CLASSES: Final[tuple[type[Any], ...]] = (
    ModelConfig,
    LoadConfig,
    ParallelConfig,
    CacheConfig,
    SchedulerConfig,
    AttentionConfig,
    StructuredOutputsConfig,
    ObservabilityConfig,
)
WHOLE_PARTS: Final = (
    "attention_config",
    "structured_outputs_config",
    "kv_transfer_config",
    "kv_events_config",
)
OWN_FIELDS: Final = ("additional_config", "shutdown_timeout")


@dataclasses.dataclass(frozen=True, slots=True)
class ArgSpec:
    """One field of `EngineArgs`.

    group: the config class it belongs to (heading of the help page). target: the field of that class. kind: how the
    text is parsed: bool, int, human, length, float, text, json or a list of one of them (trailing `*`).
    """

    name: str
    group: str
    target: str
    kind: str
    default: Any  # any value of a config field
    doc: str
    flag: Flag = PLAIN
    choices: tuple[str, ...] = ()
    default_factory: Callable[[], Any] | None = None


def _strip(hint: Any) -> tuple[Any, bool]:
    """A type hint without `Annotated` and `None`; whether None was allowed."""
    optional = False
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif get_origin(hint) in (Union, types.UnionType):
            members = [member for member in get_args(hint) if member is not type(None)]
            optional |= len(members) < len(get_args(hint))
            hint = members[0] if len(members) == 1 else tuple(members)
        else:
            return hint, optional


def _kind(hint: Any, default: Any, flag: Flag) -> str:
    if flag.human:
        return "human"
    plain = {bool: "bool", int: "int", float: "float", str: "text"}
    stripped, _ = _strip(hint)
    if isinstance(stripped, tuple):  # text or something else: a flag gives text
        return "text*" if list[str] in stripped else "text"
    if get_origin(stripped) is Literal:
        return "text"
    if get_origin(stripped) is list:
        return "text*"
    if get_origin(stripped) is dict or isinstance(default, dict):
        return "json"
    return plain.get(stripped, "text")


def _choices(hint: Any) -> tuple[str, ...]:
    stripped, _ = _strip(hint)
    return get_args(stripped) if get_origin(stripped) is Literal else ()


def specs_of(config_class: type[Any], names: Iterable[str] | None = None) -> list[ArgSpec]:
    """The flags that the settings of a class declare, all of them or those of some fields."""
    hints = get_type_hints(config_class, include_extras=True)
    specs = []
    for field in dataclasses.fields(config_class):
        info = setting_info(field)
        if info is None or info.flag.hidden or (names is not None and field.name not in names):
            continue
        factory = None if field.default_factory is dataclasses.MISSING else field.default_factory
        default = factory() if factory is not None else field.default
        kind = "length" if field.name == "max_model_len" else _kind(hints[field.name], default, info.flag)
        specs.append(
            ArgSpec(
                name=info.flag.name or field.name,
                group=config_class.__name__,
                target=field.name,
                kind=kind,
                default=None if info.flag.unset else default,
                doc=info.doc,
                flag=info.flag,
                choices=_choices(hints[field.name]),
                default_factory=None if info.flag.unset else factory,
            )
        )
    return specs


def _whole_parts() -> list[ArgSpec]:
    docs = {field.name: setting_info(field) for field in dataclasses.fields(VllmConfig)}
    return [
        ArgSpec(name, "VllmConfig", name, "json", None, f"{info.doc} As JSON or with dots.")
        for name in WHOLE_PARTS
        if (info := docs[name]) is not None
    ]


def _engine_only() -> list[ArgSpec]:
    return [
        ArgSpec("disable_log_stats", "Engine", "", "bool", False, "Do not log or export statistics."),
        ArgSpec(
            "fail_on_environ_validation",
            "Engine",
            "",
            "bool",
            False,
            "Unknown VLLM_* variables are an error.",
        ),
    ]


def _unsupported() -> list[ArgSpec]:
    return [
        ArgSpec(
            name, entry.group, "", entry.kind, entry.default, f"Not supported: {entry.reason}.", entry.flag
        )
        for name, entry in UNSUPPORTED.items()
    ]


def build_table() -> dict[str, ArgSpec]:
    """All fields of `EngineArgs` by name, in the order of the help page."""
    specs: list[ArgSpec] = []
    for config_class in CONFIG_CLASSES:
        specs += specs_of(config_class)
    specs += specs_of(VllmConfig, OWN_FIELDS) + _whole_parts() + _engine_only() + _unsupported()
    return {spec.name: spec for spec in specs}


def model_length(text: str) -> int:
    """Type of `--max-model-len`: an integer with suffix, or `auto` (= −1)."""
    return -1 if text.strip().lower() == "auto" else human_readable_int(text)


def optional_text(text: str) -> str | None:
    """Text; the word `None` means that nothing is given."""
    return None if text == "None" else text


_PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    "int": int,
    "float": float,
    "human": human_readable_int,
    "length": model_length,
    "text": optional_text,
    "json": json_value,
}


def add_flag(group: argparse._ArgumentGroup, spec: ArgSpec) -> None:
    """Declare the flag of one field."""
    names = [f"--{name.replace('_', '-')}" for name in (spec.name, *spec.flag.aliases)]
    if spec.flag.short is not None:
        names.append(f"-{spec.flag.short}")
    doc = spec.doc.replace("%", "%%")
    if spec.kind == "bool":
        group.add_argument(
            *names, dest=spec.name, action=argparse.BooleanOptionalAction, default=spec.default, help=doc
        )
        return
    default = spec.default_factory() if spec.default_factory is not None else spec.default
    group.add_argument(
        *names,
        dest=spec.name,
        type=_PARSERS[spec.kind.rstrip("*")],
        nargs="+" if spec.kind.endswith("*") else None,
        choices=spec.choices or None,
        default=default,
        help=doc,
        metavar=None if spec.choices else spec.kind.rstrip("*").upper(),
    )
