"""The KV core without its native half: the same tests hold, in a process that is told not to load it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VLLM_NO_NATIVE": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )


def test_blocks_queue_pool_and_hashes_pass_in_python() -> None:
    names = ("free_block_queue", "block_pool", "block_hash", "block_hasher", "block_lease")
    files = [f"tests/unit/kv_core/test_{name}.py" for name in names]
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout


def test_it_says_that_the_core_runs_in_python() -> None:
    code = "from vllm.v1.core.kv_cache_block import KVCacheBlock, PythonBlock; print(KVCacheBlock is PythonBlock)"
    done = run("-c", code)
    assert done.stdout.splitlines()[-1] == "True", done.stderr
    assert "VLLM_NO_NATIVE is set: the KV core runs in Python" in done.stdout
