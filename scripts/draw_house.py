"""Draws docs/images/house.svg, the picture of the layers in the README. Run after the layers change."""

from __future__ import annotations

from pathlib import Path

FLOORS = [
    ("L8 entrypoints", "vllm serve · OpenAI HTTP server · LLM class · CLI", "#e8eef7"),
    ("L7 engine", "core loop · process and sockets · clients · detokenizer · metrics · executors", "#dbe6f4"),
    ("L6 device side", "workers · model runner · models and ops · sampler · copy backends · ZMQ", "#cdddf0"),
    ("L5 scheduler", "admission · running · preemption · remote loads · results", "#fbe9cf"),
    (
        "L4 offload, connectors, events",
        "tiers · transfers · store policy · SimpleCPUOffloadScheduler",
        "#f9dfb6",
    ),
    ("L3 KV core", "block pool · index · leases · one file per KV kind · coordinator · planner", "#f6d49c"),
    ("L2 values", "KV specs and config · hashes · requests · step data · event types", "#eceadf"),
    ("L1 intent", "config objects · flags · sampling parameters · outputs", "#e3e1d4"),
    ("L0 base", "checks · clock · ids · hashing · registry · errors · logging", "#dad8c8"),
]
WIDTH, HEIGHT, LEFT, TOP = 760, 46, 150, 84


def main() -> None:
    """Writes the picture."""
    total = TOP + HEIGHT * len(FLOORS) + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 20} {total}" font-family="sans-serif">'
    ]
    parts.append(f'<rect width="{WIDTH + LEFT + 20}" height="{total}" fill="white"/>')
    roof = f"{LEFT - 14},{TOP} {LEFT + WIDTH / 2},16 {LEFT + WIDTH + 14},{TOP}"
    parts.append(f'<polygon points="{roof}" fill="#8c4a3c"/>')
    middle = LEFT + WIDTH / 2
    parts.append(
        f'<text x="{middle}" y="66" fill="white" font-size="18" text-anchor="middle">vllm: each floor stands on the ones below</text>'
    )
    for number, (name, rooms, colour) in enumerate(FLOORS):
        y = TOP + number * HEIGHT
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="{colour}" stroke="#666"/>'
        )
        parts.append(f'<text x="{LEFT + 14}" y="{y + 19}" font-size="14" font-weight="bold">{name}</text>')
        parts.append(f'<text x="{LEFT + 14}" y="{y + 37}" font-size="13" fill="#333">{rooms}</text>')
    parts.append(_brace(TOP, 3, "muscles:", "torch, threads,", "sockets"))
    parts.append(_brace(TOP + 3 * HEIGHT, 3, "brain: plain", "deterministic", "Python"))
    parts.append(_brace(TOP + 6 * HEIGHT, 3, "words the", "floors share", ""))
    foot = TOP + len(FLOORS) * HEIGHT + 30
    note = "A module imports only from lower floors; tests/tidy checks it. The brain never imports torch, sockets, threads or clocks."
    parts.append(f'<text x="{LEFT}" y="{foot}" font-size="13" fill="#333">{note}</text></svg>')
    target = Path(__file__).resolve().parents[1] / "docs/images/house.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(parts) + "\n")


def _brace(y: float, floors: int, *lines: str) -> str:
    bottom = y + floors * HEIGHT
    x = LEFT - 20
    path = f"M{x + 8},{y + 4} h-8 V{bottom - 4} h8"
    text = "".join(
        f'<text x="{x - 8}" y="{(y + bottom) / 2 - 10 + 17 * n}" font-size="13" text-anchor="end">{line}</text>'
        for n, line in enumerate(lines)
    )
    return f'<path d="{path}" fill="none" stroke="#444"/>{text}'


if __name__ == "__main__":
    main()
