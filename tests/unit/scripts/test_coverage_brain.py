"""The bar for branch coverage: each layer of the brain must reach it, not only all of them together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
L2, L3, L7 = "vllm/v1/request.py", "vllm/v1/core/block_pool.py", "vllm/v1/engine/core.py"


def report(**covered: tuple[int, int]) -> dict[str, object]:
    paths = {"l2": L2, "l3": L3, "l7": L7}
    return {
        "files": {
            paths[layer]: {
                "summary": {
                    "covered_branches": count,
                    "num_branches": total,
                    "covered_lines": total,
                    "num_statements": total,
                    "percent_covered": 100.0,
                }
            }
            for layer, (count, total) in covered.items()
        }
    }


@pytest.mark.parametrize(
    ("covered", "status"),
    [
        ({"l2": (95, 100), "l3": (960, 1000)}, 0),
        ({"l2": (94, 100), "l3": (1000, 1000)}, 1),
        ({"l2": (94, 100), "l3": (940, 1000)}, 1),
        ({"l2": (95, 100), "l7": (0, 100)}, 0),
    ],
    ids=["all reach it", "one layer does not", "none does", "other layers do not count"],
)
def test_every_layer_must_reach_the_bar(
    covered: dict[str, tuple[int, int]], status: int, tmp_path: Path
) -> None:
    path = tmp_path / "coverage.json"
    path.write_text(json.dumps(report(**covered)))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "coverage_brain.py"), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert f"L2: {100 * covered['l2'][0] / covered['l2'][1]:5.1f} %" in done.stdout
