"""Plugins of outside packages: chosen by name, called once, and never able to stop a start."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from vllm import plugins


def entry(name: str, load: Callable[[], object]) -> SimpleNamespace:
    return SimpleNamespace(name=name, load=load)


def broken() -> object:
    raise ImportError("no such thing")


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[SimpleNamespace]]:
    found: dict[str, list[SimpleNamespace]] = {}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found.get(group, []))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return found


def test_plugins_of_a_group(
    entries: dict[str, list[SimpleNamespace]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries["g"] = [entry("a", lambda: len), entry("b", lambda: repr), entry("bad", broken)]
    with caplog.at_level(logging.ERROR):
        assert plugins.load_plugins_by_group("g") == {"a": len, "b": repr}
    assert "Plugin bad of group g cannot be loaded" in caplog.text
    monkeypatch.setenv("VLLM_PLUGINS", "b,other")
    assert plugins.load_plugins_by_group("g") == {"b": repr}
    assert plugins.load_plugins_by_group("none") == {}


def test_general_plugins_are_called_once_and_may_fail(
    entries: dict[str, list[SimpleNamespace]], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    entries[plugins.GENERAL_GROUP] = [
        entry("bad", lambda: broken),
        entry("good", lambda: lambda: calls.append("x")),
    ]
    plugins.load_general_plugins.cache_clear()
    with caplog.at_level(logging.ERROR):
        plugins.load_general_plugins()
        plugins.load_general_plugins()
    assert calls == ["x"]
    assert "Plugin bad failed" in caplog.text
    plugins.load_general_plugins.cache_clear()
