"""`vllm collect-env`: what a bug report should say about the machine. Layer: L8."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Final

from vllm import envs, platforms
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__

PACKAGES: Final = (
    "torch", "transformers", "tokenizers", "numpy", "msgspec", "pyzmq", "fastapi", "uvicorn", "pydantic",
    "prometheus_client", "llguidance", "huggingface_hub", "safetensors",
)  # fmt: skip
SECRETS: Final = ("VLLM_API_KEY",)


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter, `-` for those that are missing."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "-"
    return versions


def report() -> str:
    """The report."""
    device = platforms.current_platform
    lines = [
        f"vllm: {__version__}",
        f"python: {sys.version.split()[0]} ({sys.executable})",
        f"platform: {platform.platform()}",
        f"processors: {os.cpu_count()}",
        f"device: {device.device_type or 'none'}",
        f"device memory: {device.get_device_total_memory() / 2**30:.1f} GiB",
        "packages:",
        *(f"  {name}: {version}" for name, version in package_versions().items()),
        "environment:",
    ]
    for name in envs.VARIABLES:
        if envs.is_set(name):
            lines.append(f"  {name}={'***' if name in SECRETS else os.environ[name]}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Print the report; the exit status."""
    FlexibleArgumentParser(prog="vllm collect-env").parse_args(argv)
    print(report())
    return 0
