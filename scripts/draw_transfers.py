"""Draws docs/images/kv_store.svg and kv_load.svg: who holds which block while a copy runs. Run after the flow changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
LANES = ("scheduler", "device pool", "tier", "workers")
COLOURS = {"scheduler": "#fbe9cf", "device pool": "#f6d49c", "tier": "#f9dfb6", "workers": "#cdddf0"}
WIDTH, LEFT, TOP, STEP = 1220, 20, 92, 58


@dataclass(frozen=True)
class Event:
    """One line of the story: what happens in which lane, and the state of the transfer from here on."""

    lane: str
    text: str
    detail: str
    state: str


STORE = (
    Event("scheduler", "step n is scheduled", "block 7 gets its hash; bytes come later", ""),
    Event("workers", "step n computes", "the bytes of block 7 are there", ""),
    Event("scheduler", "step n is confirmed", "the policy proposes block 7", ""),
    Event("device pool", "lease on block 7", "it cannot be handed out any more", "PLANNED"),
    Event("tier", "slot 12 is staged", "held, no key; shared pools: several slots", "PLANNED"),
    Event("scheduler", "order leaves with step n+1", "store event 5: block 7 → slot 12", "SUBMITTED"),
    Event("workers", "copy after the forward", "after compute wrote; ranks report apart", "SUBMITTED"),
    Event("tier", "last report: the (first) slot gets its key", "BlockStored (medium CPU)", "DONE"),
    Event("device pool", "both leases end", "the same on failure or reset: no key then", "DONE"),
)
LOAD = (
    Event("scheduler", "device hit of 32 tokens", "the tier is asked for what follows", ""),
    Event("tier", "64 tokens found and leased", "the promise: nothing can evict them", ""),
    Event("device pool", "touch all hits, then allocate", "in every group, before any group allocates", ""),
    Event("scheduler", "promise accepted", "or a shorter prefix of it; the request waits", "PLANNED"),
    Event("device pool", "targets belong to the transfer", "nobody else reads or writes them", "PLANNED"),
    Event("scheduler", "order leaves with the step", "load event 9, sources → targets", "SUBMITTED"),
    Event("workers", "copy into the targets", "each rank reports the request", "SUBMITTED"),
    Event("scheduler", "DONE: hash, run on", "FAILED: it ends, or recomputes (policy)", "DONE | FAILED"),
    Event("tier", "both leases end", "after an abort: ABANDONED → DISCARDED", "DONE | FAILED"),
)


def draw(title: str, story: tuple[Event, ...]) -> str:
    """The story as an SVG, time running downwards."""
    column = (WIDTH - 2 * LEFT - 130) / len(LANES)
    height = TOP + STEP * len(story) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="30" font-size="20" font-weight="bold">{title}</text>',
    ]
    for number, lane in enumerate(LANES):
        x = LEFT + number * column
        parts.append(
            f'<rect x="{x + 3}" y="46" width="{column - 6}" height="{height - 60}" fill="{COLOURS[lane]}" opacity="0.35"/>'
        )
        parts.append(
            f'<text x="{x + column / 2}" y="68" font-size="15" font-weight="bold" text-anchor="middle">{lane}</text>'
        )
    parts.append(f'<text x="{WIDTH - 126}" y="68" font-size="15" font-weight="bold">transfer</text>')
    before = None
    for number, event in enumerate(story):
        x, y = LEFT + LANES.index(event.lane) * column, TOP + number * STEP
        middle = (x + column / 2, y + 21)
        if before is not None:
            parts.append(
                f'<line x1="{before[0]}" y1="{before[1] + 21}" x2="{middle[0]}" y2="{middle[1] - 21}" stroke="#888"/>'
            )
        parts.append(
            f'<rect x="{x + 9}" y="{y}" width="{column - 18}" height="42" rx="5" fill="{COLOURS[event.lane]}" stroke="#555"/>'
        )
        parts.append(_text(middle[0], y + 17, event.text, 12.5, "#000"))
        parts.append(_text(middle[0], y + 34, event.detail, 10.5, "#444"))
        if event.state:
            parts.append(
                f'<text x="{WIDTH - 126}" y="{y + 26}" font-size="13" fill="#8c4a3c">{event.state}</text>'
            )
        before = middle
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, size: float, colour: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="middle">{text}</text>'


def main() -> None:
    """Writes both pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / "kv_store.svg").write_text(draw("A store: device block 7 into slot 12", STORE))
    (IMAGES / "kv_load.svg").write_text(draw("A load: 64 tokens from the tier", LOAD))


if __name__ == "__main__":
    main()
