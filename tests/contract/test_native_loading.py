"""Without a usable native library everything runs on the references, and one notice says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm import _custom_ops as ops

SCRIPT = """
import sys, pathlib, torch
from vllm import logger
import vllm._custom_ops as ops
library = pathlib.Path(sys.argv[1])
ops._LIBRARY = library
ops._native = ops._load()
assert not ops.has_native_ops()
assert ops.native_isa() == "none"
assert not ops.select_native_isa("scalar")
x = torch.randn(3, 8)
assert torch.equal(ops.rms_norm(x, torch.ones(8), 1e-5), ops.rms_norm_ref(x, torch.ones(8), 1e-5))
assert ops.linear(x, torch.ones(2, 8).half()).shape == (3, 2)
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A process that may use native code, whatever this one was told."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_NO_NATIVE"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("content", "notice"), [(None, "are not built"), (b"no library", "cannot be loaded")]
)
def test_reference_ops_take_over_with_a_notice(content: bytes | None, notice: str, tmp_path: Path) -> None:
    library = tmp_path / "_C.abi3.so"
    if content is not None:
        library.write_bytes(content)
    done = run([sys.executable, "-c", SCRIPT, str(library)])
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert notice in output
    assert "the slower torch reference ops are used" in output


def test_a_library_of_other_sources_is_left_aside_with_a_notice() -> None:
    script = (
        "from vllm import _custom_ops as ops\n"
        "if ops.has_native_ops():\n"
        "    ops._NATIVE_OPS += ('op_of_later_sources',)\n"
        "    assert ops._load() is None\n"
        "else:\n"
        "    print('there is no library')\n"
    )
    done = run([sys.executable, "-c", script])
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "was built from other sources (it has no op_of_later_sources)"
    assert (expected if ops.has_native_ops() else "there is no library") in done.stdout + done.stderr


def test_a_native_core_of_other_sources_is_left_aside_with_a_notice() -> None:
    script = (
        "import sys, types; sys.modules['vllm._kv_core'] = types.ModuleType('vllm._kv_core')\n"
        "from vllm.v1.core.block_pool import BlockPool\n"
        "from vllm.utils.native_core import native_core\n"
        "assert native_core is None\n"
        "assert len(BlockPool(4, True, 16).get_new_blocks(3)) == 3\n"
    )
    done = run([sys.executable, "-c", script])
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "was built from other sources" in output
    assert "find_cached" in output


CUDA_SCRIPT = """
import sys, torch
for library in sys.argv[1:]:
    torch.ops.load_library(library)
assert torch._C._dispatch_has_kernel_for_dispatch_key("vllm_native::copy_blocks", "CUDA")
"""


def test_the_cuda_kernels_compile_where_a_compiler_is_and_load_without_a_device(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    native, cuda = root / "vllm/_C.abi3.so", root / "vllm/_C_cuda.abi3.so"
    compiler = shutil.which("nvcc")
    if compiler is not None:
        source = str(root / "csrc/cuda/kv_copy.cu")
        target = str(tmp_path / "kv_copy.o")
        for arch in ("sm_90a", "sm_100a", "sm_103a"):
            done = run([compiler, f"-arch={arch}", "-Xcompiler", "-fPIC", "-c", source, "-o", target])
            assert done.returncode == 0, done.stdout + done.stderr
        assert cuda.exists() or not native.exists(), "set-up builds both"
    if native.exists() and cuda.exists():
        done = run([sys.executable, "-c", CUDA_SCRIPT, str(native), str(cuda)])
        assert done.returncode == 0, done.stdout + done.stderr
