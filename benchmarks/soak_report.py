"""What a soak run found: counts, faults, memory over time with its slope, a verdict and a picture."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from tqdm import tqdm

# Until then caches fill, allocators find their size and libraries are loaded.
WARM_UP_SHARE = 0.4
WARM_UP_MIN_S = 60.0
# Less than this after the warm-up says nothing about a slope.
SLOPE_MIN_S = 240.0
FAULTS_KEPT = 50
BARS = " ▁▂▃▄▅▆▇█"


@dataclass
class Life:
    """One start of the server; `samples` are (seconds since the first start, server's MiB, children's MiB)."""

    knobs: str
    end: str = ""
    samples: list[tuple[float, float, float]] = field(default_factory=list)

    def warm(self) -> list[tuple[float, float, float]]:
        """The samples after the warm-up."""
        if not self.samples:
            return []
        first, last = self.samples[0][0], self.samples[-1][0]
        start = first + max(WARM_UP_MIN_S, WARM_UP_SHARE * (last - first))
        return [sample for sample in self.samples if sample[0] >= start]

    def slopes(self) -> tuple[float, float] | None:
        """MiB per minute of server and children after the warm-up; None if that was too short to tell.

        The median over all pairs of points (Theil–Sen), so that a spike or a step of the allocator weighs little.
        """
        warm = self.warm()
        if not warm or warm[-1][0] - warm[0][0] < SLOPE_MIN_S:
            return None
        thin = warm[:: max(1, len(warm) // 120)]
        slopes = []
        for part in (1, 2):
            pairs = [
                (late[part] - early[part]) / (late[0] - early[0]) * 60
                for i, early in enumerate(thin)
                for late in thin[i + len(thin) // 4 :]
                if late[0] > early[0]
            ]
            slopes.append(statistics.median(pairs) if pairs else 0.0)
        return slopes[0], slopes[1]


@dataclass
class Tally:
    """What happened. `faults` is empty after a good run."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Records one thing that must not happen."""
        self.counts["faults"] += 1
        if len(self.faults) < FAULTS_KEPT:
            self.faults.append(text)
        tqdm.write(f"FAULT: {text}")

    def longest(self) -> Life | None:
        """The life with the most samples, which is the one that tells about memory."""
        return max(self.lives, key=lambda life: len(life.samples), default=None)


def memory_verdict(tally: Tally, limit_mib_per_min: float) -> tuple[bool, str]:
    """Whether memory is as it should be in every life that was long enough, and why; the longest one is told in full."""
    life = tally.longest()
    slopes = life.slopes() if life is not None else None
    if life is None or slopes is None:
        return True, f"memory: not judged, no life had {SLOPE_MIN_S:.0f} s after its warm-up"
    minutes = (life.warm()[-1][0] - life.warm()[0][0]) / 60
    totals = [sum(slopes)]
    text = (
        f"memory: {totals[0]:+.2f} MiB/min over {minutes:.1f} min after the warm-up of the longest life "
        f"(server {slopes[0]:+.2f}, engine {slopes[1]:+.2f}; limit {limit_mib_per_min:g})"
    )
    for other in tally.lives:
        slopes = other.slopes()
        if other is not life and slopes is not None:
            totals.append(sum(slopes))
            text += f"; {totals[-1]:+.2f} in {other.knobs.split(',')[0]!r}"
    return max(totals) <= limit_mib_per_min, text


def spark(values: list[float], width: int = 60) -> str:
    """The values as a line of bars from zero to their maximum."""
    if not values:
        return ""
    step = max(1, len(values) // width)
    chosen = [max(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(chosen) or 1.0
    return "".join(BARS[round(value / top * (len(BARS) - 1))] for value in chosen)


def finish(tally: Tally, limit_mib_per_min: float, out: Path, about: dict[str, Any]) -> bool:
    """Prints counts, faults, memory and the verdict, writes OUT/soak.json and .png; True if all was well."""
    fine, memory = memory_verdict(tally, limit_mib_per_min)
    good = fine and not tally.faults
    print("\nsoak run")
    for name in sorted(tally.counts):
        print(f"  {name:28s} {tally.counts[name]:8d}")
    life = tally.longest()
    if life is not None and life.samples:
        line = spark([sample[1] + sample[2] for sample in life.samples])
        print(
            f"  RSS of the longest life {line} {life.samples[-1][1] + life.samples[-1][2]:.0f} MiB at its end"
        )
    print(f"  {memory}")
    for fault in tally.faults:
        print(f"  FAULT: {fault}")
    if tally.counts["faults"] > len(tally.faults):
        print(f"  … and {tally.counts['faults'] - len(tally.faults)} more")
    _write(tally, out, about | {"good": good, "memory": memory})
    broken = f"{tally.counts['faults']} faults" + ("" if fine else ", memory grows")
    print(f"\nVERDICT: {'PASS' if good else 'FAIL: ' + broken}  ({out / 'soak.png'})")
    return good


def _write(tally: Tally, out: Path, about: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lives = [
        {
            "knobs": life.knobs,
            "end": life.end,
            "slopes_mib_per_min": life.slopes(),
            "seconds": len(life.samples),
        }
        for life in tally.lives
    ]
    data = about | {"counts": dict(tally.counts), "faults": tally.faults, "lives": lives}
    (out / "soak.json").write_text(json.dumps(data, indent=1) + "\n")
    figure, axis = plt.subplots(figsize=(9, 3.6))
    for number, life in enumerate(tally.lives):
        minutes = [sample[0] / 60 for sample in life.samples]
        for part, (label, color) in ((1, ("server", "C0")), (2, ("engine", "C1"))):
            axis.plot(minutes, [s[part] for s in life.samples], color=color, label="" if number else label)
        if life.samples:
            axis.axvline(minutes[-1], color="gray", linewidth=0.5)
            axis.annotate(life.end, (minutes[-1], 0), rotation=90, fontsize=6, ha="right", va="bottom")
        if life is tally.longest() and (warm := life.warm()):
            axis.axvspan(warm[0][0] / 60, warm[-1][0] / 60, color="C2", alpha=0.12, label="slope taken here")
    axis.set(xlabel="minutes", ylabel="RSS, MiB", title=about["memory"])
    axis.title.set_fontsize(8)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out / "soak.png", dpi=90)
    plt.close(figure)
