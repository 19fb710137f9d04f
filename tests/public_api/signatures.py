"""Compare public callables with the signatures that the interface description gives them.

A signature is written as in a `def`: `name, block_ids, finished=False, *, error=None`. On top of Python's grammar:

* a trailing `...`: further optional parameters may follow; without it, only further keyword-only optional ones may;
* a parameter whose name starts with `_`: any name, the place counts;
* the default `_`: some default, whichever;
* a leading `kw |`: the parameters are given by keyword, so order and kind are free;
* a bare word as default (`CUMULATIVE`): the name of an enum member.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

REQUIRED = inspect.Parameter.empty
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Wanted:
    """One parameter of a written signature; `default` is source text, None when it is required."""

    name: str
    default: str | None
    keyword_only: bool


@dataclass(frozen=True)
class Signature:
    """A written signature."""

    parameters: list[Wanted]
    is_open: bool
    by_keyword: bool


def parse(text: str) -> Signature:
    """Read a written signature. Raises SyntaxError on a typing mistake in a table."""
    by_keyword = text.startswith("kw |")
    body = text.removeprefix("kw |").strip()
    is_open = body.endswith("...")
    body = body.removesuffix("...").rstrip().removesuffix(",")
    function = ast.parse(f"def f({body}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
    wanted = [Wanted(a.arg, d, False) for a, d in zip(args.args, defaults, strict=True)]
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        wanted.append(Wanted(arg.arg, None if default is None else ast.unparse(default), True))
    return Signature(wanted, is_open, by_keyword)


def find(path: str) -> object:
    """The object behind `module:Name.attribute`; the module alone without a colon."""
    module_name, _, names = path.partition(":")
    found: object = importlib.import_module(module_name)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def _factory_defaults(owner: object) -> dict[str, object]:
    """Values of defaults that `inspect` shows only as a factory."""
    if not isinstance(owner, type):
        return {}
    values: dict[str, object] = {}
    if issubclass(owner, msgspec.Struct):
        for item in msgspec.structs.fields(owner):
            if item.default_factory is not msgspec.NODEFAULT:
                values[item.name] = item.default_factory()
    elif dataclasses.is_dataclass(owner):
        for field in owner.__dataclass_fields__.values():
            if field.default_factory is not dataclasses.MISSING:
                values[field.name] = field.default_factory()
            elif field.default is not dataclasses.MISSING:
                values[field.name] = field.default
    elif hasattr(owner, "model_fields"):
        for name, info in owner.model_fields.items():
            if not info.is_required():
                values[name] = info.get_default(call_default_factory=True)
    return values


def _parameters(path: str) -> list[inspect.Parameter]:
    """Parameters as a caller sees them: without self, defaults made visible."""
    found = find(path)
    assert callable(found), f"{path} is not callable"
    call: Callable[..., object] = found
    parameters = list(inspect.signature(call).parameters.values())
    holder = path.rpartition(".")[0] if "." in path.partition(":")[2] else ""
    if holder and (inspect.isfunction(found) or inspect.ismethoddescriptor(found)):
        owner = find(holder)
        raw = inspect.getattr_static(owner, path.rpartition(".")[2])
        if isinstance(owner, type) and not isinstance(raw, staticmethod):
            parameters = parameters[1:]
    factories = _factory_defaults(found)
    return [
        p.replace(default=factories[p.name]) if p.default is not REQUIRED and p.name in factories else p
        for p in parameters
    ]


def _same_default(actual: object, wanted: str | None) -> bool:
    if wanted is None:
        return True  # a default for a required parameter breaks no caller
    if actual is REQUIRED:
        return False
    if wanted == "_":
        return True
    try:
        value: object = ast.literal_eval(wanted)
    except ValueError:
        if wanted == "set()":
            return actual == set() and isinstance(actual, set)
        return isinstance(actual, Enum) and actual.name == wanted
    if isinstance(value, list | tuple) and isinstance(actual, list | tuple):
        return list(actual) == list(value)
    return type(actual) is type(value) and actual == value


def _shown(default: object) -> str:
    return "required" if default is REQUIRED else repr(default)


def mismatches(path: str, text: str) -> list[str]:
    """What differs between the callable at `path` and the written signature; empty when they agree."""
    wanted, actual = parse(text), _parameters(path)
    by_name = {p.name: p for p in actual}
    swallows = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in actual)
    problems: list[str] = []
    positional = [p for p in actual if p.kind not in (*_VARIADIC, KEYWORD_ONLY)]
    matched: set[str] = set()
    for index, parameter in enumerate(wanted.parameters):
        in_place = positional[index] if index < len(positional) else None
        if parameter.name.startswith("_"):
            found = in_place
        else:
            found = by_name.get(parameter.name)
        if found is None:
            if not swallows:
                problems.append(f"{parameter.name}: missing")
            continue
        matched.add(found.name)
        if not _same_default(found.default, parameter.default):
            problems.append(
                f"{parameter.name}: wanted default {parameter.default}, is {_shown(found.default)}"
            )
        if wanted.by_keyword:
            continue
        if parameter.keyword_only != (found.kind is KEYWORD_ONLY):
            problems.append(f"{parameter.name}: keyword-only wanted {parameter.keyword_only}")
        elif not parameter.keyword_only and in_place is not found:
            problems.append(f"{parameter.name}: not in place {index}")
    for extra in actual:
        if extra.name in matched or extra.kind in _VARIADIC:
            continue
        if extra.default is REQUIRED:
            problems.append(f"{extra.name}: required, but not described")
        elif not (wanted.is_open or wanted.by_keyword or extra.kind is KEYWORD_ONLY):
            problems.append(f"{extra.name}: not described and not keyword-only")
    return problems
