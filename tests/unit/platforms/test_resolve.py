"""How the platform of a process is found: clues of CUDA, plugins, wrong plugins."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest

from vllm.platforms import Platform, UnspecifiedPlatform, resolve
from vllm.platforms.cpu import CpuPlatform


class PluginPlatform(Platform):
    """Brought from outside."""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with an NVIDIA driver and a CUDA build of torch."""
    present = tmp_path / "version"
    present.touch()
    monkeypatch.setattr(resolve, "Path", lambda _: present)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return present


def test_a_driver_and_a_cuda_build_make_cuda_likely(driver) -> None:
    assert resolve.cuda_is_likely()


@pytest.mark.parametrize("missing", ["driver", "build", "torch", "devices"])
def test_each_clue_is_needed(driver, monkeypatch, missing) -> None:
    if missing == "driver":
        driver.unlink()
    elif missing == "build":
        monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0+cpu")
    elif missing == "devices":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:

        def absent(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", absent)
    assert not resolve.cuda_is_likely()


def entry(name: str, result: object) -> SimpleNamespace:
    def activate() -> object:
        if isinstance(result, Exception):
            raise result
        return result

    return SimpleNamespace(name=name, load=lambda: activate)


@pytest.fixture
def plugins(monkeypatch):
    entries: list[SimpleNamespace] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return entries


def test_active_plugins_are_found_and_broken_ones_skipped(plugins, monkeypatch) -> None:
    plugins += [entry("mine", "m:P"), entry("idle", None), entry("broken", RuntimeError("no device"))]
    assert resolve.plugin_targets() == {"mine": "m:P"}
    monkeypatch.setenv("VLLM_PLUGINS", "idle")
    assert resolve.plugin_targets() == {}


def test_a_plugin_beats_the_built_in_ones(plugins) -> None:
    plugins.append(entry("mine", f"{__name__}:PluginPlatform"))
    assert isinstance(resolve.resolve_current_platform.__wrapped__(), PluginPlatform)


def test_a_plugin_must_name_a_platform(plugins) -> None:
    plugins.append(entry("mine", "builtins:int"))
    with pytest.raises(TypeError, match=r"builtins:int must be a subclass of vllm\.platforms\.Platform"):
        resolve.resolve_current_platform.__wrapped__()


def test_the_host_is_the_last_resort_and_an_unknown_device_none(plugins, monkeypatch) -> None:
    monkeypatch.setattr(resolve, "cuda_is_likely", lambda: False)
    assert isinstance(resolve.resolve_current_platform.__wrapped__(), CpuPlatform)
    monkeypatch.setattr(resolve, "choose_target", lambda *_: None)
    assert isinstance(resolve.resolve_current_platform.__wrapped__(), UnspecifiedPlatform)
