"""`make bench`: every benchmark in turn; further arguments go to the serving benchmark (for example `--peer-python`).

The core's benchmarks print their tables; those of offload and serving also write tables and plots below benchmarks/results/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ("bench_core.py", "bench_scheduler.py", "bench_offload.py", "bench_serving.py")


def main() -> int:
    """The number of benchmarks that failed."""
    failed = 0
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        extra = sys.argv[1:] if script == "bench_serving.py" else []
        failed += subprocess.run([sys.executable, str(HERE / script), *extra], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
