"""Branch coverage of the brain (L2–L5): `python scripts/coverage_brain.py FILE.json`, from `coverage json`.

Which file is in which layer is said by tests/tidy/layers.toml. Prints the layers and the files below the bar; exit
status 1 if the branches of a layer, or all together, are covered to less than it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.tidy.source_tree import layer_of  # noqa: E402

BRAIN = range(2, 6)
BAR = 95.0


def percent(covered: int, total: int) -> float:
    """Share in per cent; nothing to cover counts as covered."""
    return 100.0 * covered / total if total else 100.0


def main() -> int:
    """Prints the report; 1 if a layer of the brain, or all of it, is below the bar."""
    report = json.loads(Path(sys.argv[1]).read_text())
    totals: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    below: list[tuple[float, str]] = []
    for path, data in report["files"].items():
        found = layer_of(path)
        if found is None or found.rank not in BRAIN:
            continue
        layer = found.rank
        summary = data["summary"]
        figures = (
            summary["covered_branches"],
            summary["num_branches"],
            summary["covered_lines"],
            summary["num_statements"],
        )
        for index, figure in enumerate(figures):
            totals[layer][index] += figure
        if summary["percent_covered"] < BAR:
            below.append((summary["percent_covered"], path))
    for share, path in sorted(below):
        print(f"{share:6.1f} %  {path}")
    for layer in sorted(totals):
        branches, all_branches, lines, all_lines = totals[layer]
        print(f"L{layer}: {percent(branches, all_branches):5.1f} % of {all_branches} branches, ", end="")
        print(f"{percent(lines, all_lines):5.1f} % of {all_lines} lines")
    whole = percent(sum(t[0] for t in totals.values()), sum(t[1] for t in totals.values()))
    print(f"L2–L5: {whole:.1f} % of all branches, at least {BAR:.0f} % wanted, of each layer too")
    return int(min(whole, *(percent(t[0], t[1]) for t in totals.values())) < BAR)


if __name__ == "__main__":
    sys.exit(main())
