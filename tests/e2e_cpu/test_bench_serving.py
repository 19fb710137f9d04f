"""The serving benchmark from end to end in its quick mode: servers and schedulers in one run, side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_one_run_has_the_figures_of_the_server_and_of_the_scheduler(tmp_path: Path) -> None:
    # A second engine of the same interpreter stands in for the peer: what matters is that both are in every row.
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_serving.py"), "--quick", "--rounds", "1"]
    command += ["--peer-python", sys.executable, "--peer-name", "again", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    data = json.loads((tmp_path / "serving.json").read_text())
    rows = data["rows"]
    assert list(rows) == [
        "start to ready, s",
        "TTFT cold 64 tokens, ms",
        "TTFT device hit 64 tokens, ms",
        "TTFT CPU hit 64 tokens, ms",
        "TTFT cold 128 tokens, ms",
        "TTFT device hit 128 tokens, ms",
        "TTFT CPU hit 128 tokens, ms",
        "decode, ms/token",
        "requests/s (16 tokens in, 1 out)",
        "RSS after the run, MiB",
        "scheduler step: schedule + update, 256 decodes, ms",
        "the same, prompts of 2000 tokens, ms",
    ]
    for name, values in rows.items():
        # The peer is started without a CPU pool.
        assert list(values) == (["ours"] if "CPU hit" in name else ["ours", "again"]), name
        assert all(value > 0 for value in values.values()), name
    assert data["rounds"]["ours"]["decode, ms/token"] == [rows["decode, ms/token"]["ours"]]
    text = (tmp_path / "serving.md").read_text()
    assert "These numbers mean nothing" in text
    assert "one run of `python benchmarks/bench_serving.py --rounds 1" in text
    assert (tmp_path / "serving.png").read_bytes()[:4] == b"\x89PNG"
