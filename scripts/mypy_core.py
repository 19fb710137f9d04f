"""Runs mypy in strict mode over layers L0 to L5, as tests/tidy/layers.toml defines them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.tidy.source_tree import layer_of, modules  # noqa: E402

STRICT_RANK_MAX = 5


def main() -> int:
    """Exit status of mypy."""
    files = []
    for module in modules().values():
        layer = layer_of(module.relative)
        if layer is not None and layer.rank <= STRICT_RANK_MAX:
            files.append(module.relative)
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *files], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
