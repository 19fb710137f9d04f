"""How a setting is declared: its default, its doc and the shape of its flag, in one place. Layer: L1.

`@config` makes a validated, mutable dataclass of a class whose fields are `setting(...)` or `state(...)`. The command
line (`engine/arg_utils.py`) is derived from these declarations, so a setting is written down exactly once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from difflib import get_close_matches
from typing import Concatenate, Final, ParamSpec, TypeVar, cast, dataclass_transform, overload

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as validated_dataclass

T = TypeVar("T")
P = ParamSpec("P")
_METADATA_KEY: Final = "vllm_setting"
_STATE_KEY: Final = "vllm_state"


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """Shape of a setting on the command line.

    name: field of `EngineArgs` and, dashed, the long flag; None means the setting's own name. hidden: no flag at all.
    unset: `EngineArgs` holds None until the user gives a value; the final value is derived. short, aliases: further
    spellings. human: accepts `1k`, `2M` and the like.
    """

    name: str | None = None
    hidden: bool = False
    unset: bool = False
    human: bool = False
    short: str | None = None
    aliases: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SettingInfo:
    """What a field's declaration says besides type and default."""

    doc: str
    flag: Flag


PLAIN: Final = Flag()
HIDDEN: Final = Flag(hidden=True)


@overload
def setting(*, default: T, doc: str, flag: Flag = PLAIN, secret: bool = False) -> T: ...
@overload
def setting(*, default_factory: Callable[[], T], doc: str, flag: Flag = PLAIN) -> T: ...
def setting(
    *,
    default: object = None,
    default_factory: Callable[[], object] | None = None,
    doc: str,
    flag: Flag = PLAIN,
    secret: bool = False,
) -> object:
    """Declare a constructor field of a config class. A secret is left out of `repr` and so out of logs."""
    metadata = {_METADATA_KEY: SettingInfo(doc, flag)}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@overload
def state(*, default: T, doc: str) -> T: ...
@overload
def state(*, default_factory: Callable[[], T], doc: str) -> T: ...
def state(*, default: object = None, default_factory: Callable[[], object] | None = None, doc: str) -> object:
    """Declare a field that is not given but derived, or assigned later by the engine."""
    metadata = {_STATE_KEY: doc}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, init=False, metadata=metadata)
    return dataclasses.field(default=default, init=False, metadata=metadata)


def setting_info(field: dataclasses.Field[object]) -> SettingInfo | None:
    """The declaration behind a dataclass field; None for a `state` field."""
    return cast(SettingInfo | None, field.metadata.get(_METADATA_KEY))


def _refuse_unknown_keywords(
    class_name: str, known: list[str], init: Callable[Concatenate[object, P], None]
) -> Callable[Concatenate[object, P], None]:
    def checked_init(self: object, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if len(args) > len(known):
            raise TypeError(
                f"{class_name}() takes at most {len(known)} positional arguments, got {len(args)}"
            )
        for name in kwargs:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{class_name}() got an unexpected keyword argument {name!r}{hint}")
        init(self, *args, **kwargs)

    functools.update_wrapper(checked_init, init)
    return checked_init


@dataclass_transform(field_specifiers=(setting, state))
def config(cls: type[T]) -> type[T]:
    """Class decorator: a mutable dataclass whose constructor validates.

    A bad value raises `pydantic.ValidationError` (a ValueError), an unknown keyword TypeError. Assigning a field later
    is not checked.
    """
    built = validated_dataclass(config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))(cls)
    # The dataclass machinery keeps init-only pseudo fields in the same table, in order of declaration.
    table: dict[str, dataclasses.Field[object]] = built.__dataclass_fields__
    known = [name for name, field in table.items() if field.init]
    init = _refuse_unknown_keywords(cls.__name__, known, built.__init__)
    type.__setattr__(built, "__init__", init)
    return cast(type[T], built)
