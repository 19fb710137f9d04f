"""Every public name exists with the signature of the interface description (the tables next to this file)."""

from __future__ import annotations

import pytest

from tests.public_api import (
    names_config,
    names_connectors,
    names_engine,
    names_entrypoints,
    names_kv,
    names_native,
    names_requests,
    names_sampling,
)
from tests.public_api.signatures import find, mismatches

TABLES = {
    name.rpartition("_")[2]: module
    for name, module in {
        "names_config": names_config,
        "names_connectors": names_connectors,
        "names_engine": names_engine,
        "names_entrypoints": names_entrypoints,
        "names_kv": names_kv,
        "names_native": names_native,
        "names_requests": names_requests,
        "names_sampling": names_sampling,
    }.items()
}


def _entries(kind: str) -> list[object]:
    return [
        pytest.param(path, value, id=f"{path}")
        for module in TABLES.values()
        for path, value in getattr(module, kind, {}).items()
    ]


@pytest.mark.parametrize(("module", "names"), _entries("EXPORTS"))
def test_a_module_exports_its_names(module: str, names: str) -> None:
    missing = []
    for name in names.replace(",", " ").split():
        try:
            find(f"{module}:{name}")
        except (AttributeError, ImportError) as error:
            missing.append(f"{name}: {error}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(("path", "signature"), _entries("SIGNATURES"))
def test_a_callable_has_its_signature(path: str, signature: str) -> None:
    assert not mismatches(path, signature)


@pytest.mark.parametrize(("path", "members"), _entries("MEMBERS"))
def test_a_class_has_its_methods(path: str, members: str) -> None:
    cls = find(path)
    fields = getattr(cls, "__dataclass_fields__", {})
    annotations = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    missing = [
        m
        for m in members.replace(",", " ").split()
        if not hasattr(cls, m) and m not in fields and m not in annotations
    ]
    assert not missing


@pytest.mark.parametrize(("path", "members"), _entries("ABSTRACT"))
def test_a_class_asks_for_these_methods_and_no_others(path: str, members: str) -> None:
    assert find(path).__abstractmethods__ == set(members.replace(",", " ").split())


@pytest.mark.parametrize(("path", "members"), _entries("ENUM_NAMES"))
def test_an_enum_has_these_names(path: str, members: str) -> None:
    assert list(find(path).__members__) == members.replace(",", " ").split()


@pytest.mark.parametrize(("path", "members"), _entries("ENUMS"))
def test_an_enum_has_its_members(path: str, members: dict[str, object]) -> None:
    enum = find(path)
    assert [(name, enum[name].value) for name in members] == list(members.items())
    assert set(enum.__members__) == set(members)


@pytest.mark.parametrize(("path", "value"), _entries("CONSTANTS"))
def test_a_constant_has_its_value(path: str, value: object) -> None:
    found = find(path)
    assert found == value
    assert type(found) is type(value)
