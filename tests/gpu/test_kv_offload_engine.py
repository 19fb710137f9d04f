"""Engines with an offload on a device: what comes back from host memory and from a file is what the device had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ENGINES = "tests/integration/engine/test_offloading_connector.py"
SAME_BITS = ("test_host_memory_gives_back_the_same_bits", "test_the_file_below_gives_back_the_same_bits")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "glm5_next"])
def test_what_comes_back_is_the_same_on_a_device(name: str) -> None:
    # A process of its own: which platform it is on is decided once.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ENGINES]
    chosen = " or ".join(f"({test} and {name})" for test in SAME_BITS)
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cuda"}
    run = subprocess.run(
        [*command, "-k", chosen], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed" in run.stdout
