"""Build script: reads the pinned requirements and, where a compiler is found, builds the native ops with CMake.

The native ops are optional: without a compiler (or with VLLM_NO_NATIVE=1) the package installs and every op falls
back to its torch reference, with one clear notice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


def read_requirements(name: str) -> list[str]:
    """Requirement lines of requirements/NAME.txt, following `-r` includes."""
    lines: list[str] = []
    for raw in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        line = raw.split("#", 1)[0].strip()
        if line.startswith("-r "):
            lines += read_requirements(Path(line[3:].strip()).stem)
        elif line:
            lines.append(line)
    return lines


def has_gpu() -> bool:
    """True where `nvidia-smi` answers, so that the CUDA requirements make sense."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0


class CMakeBuild(build_ext):
    """Runs CMake + Ninja for the `vllm._C` target; a missing tool or a failed build is a notice, not an error."""

    def run(self) -> None:
        reason = self._why_not()
        if reason is None:
            try:
                self._build()
                return
            except (subprocess.CalledProcessError, OSError) as error:
                reason = f"the build failed: {error}"
        print(
            f"NOTICE: native ops are not built ({reason}); the torch reference ops are used.", file=sys.stderr
        )

    @staticmethod
    def _why_not() -> str | None:
        if os.environ.get("VLLM_NO_NATIVE") == "1":
            return "VLLM_NO_NATIVE=1"
        if shutil.which("cmake") is None:
            return "cmake is not installed"
        if all(shutil.which(name) is None for name in ("c++", "g++", "clang++")):
            return "no C++ compiler is installed"
        if not (ROOT / "CMakeLists.txt").exists():
            return "the source tree has no CMakeLists.txt"
        return None

    def _build(self) -> None:
        build_dir = ROOT / "build" / "cmake"
        build_dir.mkdir(parents=True, exist_ok=True)
        output = ROOT / "vllm" if self.inplace else Path(self.build_lib).resolve() / "vllm"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        subprocess.run(
            [
                "cmake",
                "-S",
                str(ROOT),
                "-B",
                str(build_dir),
                *generator,
                "-DCMAKE_BUILD_TYPE=Release",
                f"-DVLLM_PYTHON={sys.executable}",
                f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}",
            ],
            check=True,
        )
        subprocess.run(["cmake", "--build", str(build_dir), "--parallel", "2"], check=True)


setup(
    install_requires=read_requirements("cuda" if has_gpu() else "cpu"),
    ext_modules=[Extension("vllm._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
