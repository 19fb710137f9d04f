"""Checkpoints and servers shared by the end-to-end tests. Every server is a real `vllm serve` process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.offload_roundtrip import MAX_MODEL_LEN
from examples.serving import Server, event_flags, offload_flags, serve
from scripts.demo_model import demo_model

CPU_POOL_BYTES = 128 << 20


@dataclass
class EventedServer:
    """A server with its event endpoints."""

    server: Server
    publish: str
    replay: str


def make_tiny(name: str, folder: Path) -> Path:
    """A tiny random checkpoint of a family, written by the product's own maker."""
    target = folder / name
    subprocess.run(
        [sys.executable, "-m", "vllm.model_executor.model_loader.tiny", name, str(target)], check=True
    )
    return target


@pytest.fixture(scope="session")
def tiny_glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("glm5_next", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return demo_model()


@pytest.fixture(scope="module")
def glm_server(tiny_glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventedServer]:
    """The hybrid with a scratch group, CPU tier and events on."""
    folder = tmp_path_factory.mktemp("ipc")
    publish, again = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    flags = [
        *offload_flags(CPU_POOL_BYTES),
        *event_flags(publish, again),
        "--enforce-eager",
        "--dtype",
        "float32",
    ]
    with serve(tiny_glm, *flags, "--max-model-len", str(MAX_MODEL_LEN)) as server:
        yield EventedServer(server, publish, again)
