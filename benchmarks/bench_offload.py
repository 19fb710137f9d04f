"""Offload benchmark: what a hit on each tier saves, what the copies cost, and what is stored for it.

Everything is from one run and given as ratios of things that took turns in it, medians over the rounds. Absolute numbers are
of this machine. Writes offload.{md,json,png}. `--quick` takes tiny models and sizes: it shows that the tool works, its
numbers mean nothing. Run it on an idle machine; what other programs took is measured and written down.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import offload_copies, offload_throughput
from benchmarks.offload_copies import BACKEND, BY_PAGE, GOAL_PAGE_BYTES, ONE, copy_speeds
from benchmarks.offload_engines import LoadWatch, Model, dense_model, hybrid_model
from benchmarks.offload_throughput import sides, throughput, throughput_table
from benchmarks.offload_workloads import Scale, fleet, talks, ttft_by_length, working_set_blocks
from benchmarks.report import Panel, Table, machine, results_folder, today, write_document

LENGTHS = (256, 512, 1024, 2048, 4096)
FULL = Scale(
    lengths={"dense": LENGTHS, "hybrid": LENGTHS},
    step_tokens=512,
    ttft_rounds=3,
    conversations=16,
    turns=5,
    turn_tokens=176,
    answer_tokens=8,
)
QUICK = Scale(
    lengths={"hybrid": (140, 200)},
    step_tokens=64,
    ttft_rounds=1,
    conversations=8,
    turns=3,
    turn_tokens=60,
    answer_tokens=4,
)
# A machine on which others take more than this many cores is not idle.
QUIET_CORES = 0.1
COPY_GOAL, LOSS_GOAL = 0.90, 0.01


def measure(quick: bool, rounds: int | None, folder: Path) -> dict[str, Any]:
    """All figures of a run, with its load; `rounds` replaces the numbers of rounds with servers."""
    scale = QUICK if quick else FULL
    if rounds is not None:
        scale = replace(scale, ttft_rounds=rounds)
    watch = LoadWatch()
    dense, hybrid = dense_model(quick, folder), hybrid_model(quick, folder)
    data: dict[str, Any] = {"date": today(), "machine": machine(), "quick": quick}
    data["copies"] = copy_speeds(offload_copies.QUICK if quick else offload_copies.FULL)
    data["ttft"] = []
    models = {"dense": dense, "hybrid": hybrid}
    for kind, lengths in scale.lengths.items():
        place = folder / f"disk-{kind}"
        place.mkdir()
        data["ttft"] += ttft_by_length(models[kind], lengths, scale.ttft_rounds, place)
    busy = offload_throughput.QUICK if quick else offload_throughput.Load()
    rounds = busy.rounds if rounds is None else offload_throughput.even(rounds)
    data["throughput"] = throughput(dense, replace(busy, rounds=rounds))
    data |= _side_by_side(dense, scale)
    data["load"] = watch.report()
    data["goals"] = goals(data)
    return data


def _side_by_side(model: Model, scale: Scale) -> dict[str, Any]:
    working_set = working_set_blocks(model, scale)
    with fleet(model, working_set, scale.step_tokens) as ships:
        crowded = talks(ships, model, scale, scale.conversations)
        # A quarter of the working set is one pool; half of that leaves room for what a step needs.
        roomy = talks(ships, model, scale, max(1, scale.conversations // 8))
    return {
        "conversations": crowded | {"working_set_blocks": working_set},
        "roomy": roomy,
    }


def goals(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The project's goals that this run can tell about."""
    copies = [row for row in data["copies"] if row["page_bytes"] >= GOAL_PAGE_BYTES]
    cost = data["throughput"]
    slowest: dict[tuple[str, int], float] = {}
    for row in copies:
        for method, ratio in row["backend_to"].items():
            known = slowest.get((method, row["threads"]), ratio)
            slowest[method, row["threads"]] = min(known, ratio)
    what = f"slowest copy of pages ≥ {GOAL_PAGE_BYTES >> 10} KiB ≥ {COPY_GOAL:.0%} of"
    loss = f"throughput with offload and no hits ≥ {1 - LOSS_GOAL:.0%} of without"
    kept = [(where, found["figures"]["tokens/s"]["eager_to_off"]) for where, found in sides(cost)]
    return [
        *(
            {"goal": f"{what} {method}, threads: {threads}", "measured": ratio, "met": ratio >= COPY_GOAL}
            for (method, threads), ratio in sorted(slowest.items(), reverse=True)
        ),
        *(
            {
                "goal": f"{loss}, {where}",
                "measured": found["ratio"],
                "interval": [found["low"], found["high"]],
                "met": found["ratio"] >= 1 - LOSS_GOAL,
            }
            for where, found in kept
        ),
    ]


# --- the document -----------------------------------------------------------------------------------------------


def intro(data: dict[str, Any]) -> str:
    """Heading, machine, load and goals."""
    load = data["load"]
    quiet = load["cores_used_by_others"] <= QUIET_CORES
    verdict = "idle otherwise" if quiet else "**not idle: only the ratios tell anything**"
    lines = [
        "# KV offload: what hits save and what they cost",
        "",
        f"{data['date']}, {data['machine']}; {load['wall_s'] / 60:.1f} minutes. Load average before the run "
        f"{load['load_average_before']:.2f}; other programs took {load['cores_used_by_others']:.2f} cores on average: {verdict}.",
    ]
    if data["quick"]:
        lines += ["", "**Quick mode: tiny models, one round. These numbers mean nothing.**"]
    lines += ["", "`python benchmarks/bench_offload.py` measures all of this again.", ""]
    lines += ["| goal | measured | met |", "|---|---:|---|"]
    for goal in data["goals"]:
        interval = " … ".join(f"{bound:.3f}" for bound in goal.get("interval", ()))
        measured = f"{goal['measured']:.3f}" + (f" ({interval})" if interval else "")
        lines.append(f"| {goal['goal']} | {measured} | {'yes' if goal['met'] else 'no'} |")
    return "\n".join(lines)


def tables(data: dict[str, Any]) -> list[Table]:
    """The tables of the document."""
    return [
        _ttft_table(data["ttft"]),
        _copy_table(data["copies"]),
        throughput_table(data["throughput"]),
        _talk_table(data["conversations"]),
        _write_table(data["conversations"], data["roomy"]),
    ]


def _ttft_table(rows: list[dict[str, Any]]) -> Table:
    def cell(row: dict[str, Any], kind: str) -> str:
        if kind not in row["ttft_s"]:
            return "no hit"
        return f"{row['ttft_s'][kind] * 1e3:.0f} ms, {row['faster_than_cold'][kind]:.1f} ×"

    text = (
        "Over HTTP, idle server, one token asked for. How many times faster than computing the prompt. A disk hit is the "
        "first request after a restart of the server with `disk_persist`: file → CPU pool → device pool."
    )
    body = [
        [
            row["model"],
            str(row["tokens"]),
            f"{row['ttft_s']['cold'] * 1e3:.0f} ms",
            *(cell(row, kind) for kind in ("device", "CPU", "disk")),
        ]
        for row in rows
    ]
    columns = ("model", "prompt tokens", "computed", "device hit", "CPU hit", "disk hit")
    return Table("Time to first token, by prompt length", text, columns, body)


def _copy_table(rows: list[dict[str, Any]]) -> Table:
    text = (
        "GB/s (10⁹ bytes copied per second) between two pools of 256 MiB in host memory, so that both sides are memory and not "
        "a cache. Two yardsticks. One memcpy: the C library moves the same bytes from pool to pool, one call per thread; it has the "
        "least to do. memcpy by page: the C library page by page in the same order. Its stores of a page go through the caches, and "
        "so read the target first: three transfers instead of two. Ratios are medians over the rounds of the ratio within a round."
    )
    body = [
        [
            f"{row['page_bytes'] >> 10} KiB",
            row["order"],
            row["direction"],
            str(row["threads"]),
            *(_number(row["gb_per_s"], method, 1) for method in (BY_PAGE, ONE, BACKEND)),
            *(_number(row["backend_to"], method, 2) for method in (ONE, BY_PAGE)),
        ]
        for row in rows
    ]
    columns = ("page", "order", "direction", "threads", BY_PAGE, ONE, BACKEND)
    return Table(
        "Copies between host pools", text, (*columns, "backend / one memcpy", "backend / by page"), body
    )


def _number(values: dict[str, float], name: str, digits: int) -> str:
    return f"{values[name]:.{digits}f}" if name in values else "–"


def _talk_table(row: dict[str, Any]) -> Table:
    text = (
        f"{row['model']}, {row['conversations']} conversations in a random mix; at their ends they fill "
        f"{row['working_set_blocks'] / row['device_blocks']:.1f} × the device pool of {row['device_blocks']} blocks. eager and lazy "
        "have a CPU pool for everything; disk has one as small as the device's, and a disk below. Of all prompt tokens "
        f"{row['reusable_tokens'] / row['variants']['off']['prompt_tokens']:.0%} had been sent before. TTFT is of turns after the first."
    )
    off = row["variants"]["off"]
    body = [
        [
            name,
            f"{v['hit_rate']:.1%}",
            f"{v['ttft_later_turns_median_s'] * 1e3:.0f} ms",
            f"{v['ttft_later_turns_mean_s'] * 1e3:.0f} ms",
            f"{off['ttft_later_turns_mean_s'] / v['ttft_later_turns_mean_s']:.2f} ×",
            f"{off['ttft_sum_s'] / v['ttft_sum_s']:.2f} ×",
        ]
        for name, v in row["variants"].items()
    ]
    columns = (
        "offload",
        "hit rate",
        "TTFT median",
        "TTFT mean",
        "mean: faster than off",
        "all turns: faster than off",
    )
    return Table("Conversations larger than the device pool", text, columns, body)


def _write_table(crowded: dict[str, Any], roomy: dict[str, Any]) -> Table:
    text = (
        "Bytes stored in the CPU pool / bytes of the distinct cacheable blocks that were computed. 1 is every block once. "
        "The small working set fits into the device pool."
    )
    ways = [
        ("4 × the device pool", crowded),
        ("half of the device pool", roomy),
    ]
    body = [
        [
            name,
            f"{row['writes']['unique_bytes'] / 2**20:.0f} MiB",
            *(f"{row['writes']['amplification'][variant]:.2f}" for variant in ("eager", "lazy", "disk")),
        ]
        for name, row in ways
    ]
    return Table(
        "Write amplification", text, ("working set", "computed", "eager", "lazy", "disk (eager)"), body
    )


def panels(data: dict[str, Any]) -> list[Panel]:
    """The diagrams of the document."""
    drawn = []
    for model in dict.fromkeys(row["model"] for row in data["ttft"]):
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for row in data["ttft"]:
            for kind, seconds in row["ttft_s"].items() if row["model"] == model else ():
                xs, ys = lines.setdefault(kind, ([], []))
                xs.append(row["tokens"])
                ys.append(seconds * 1e3)
        title = f"Time to first token\n{model}"
        drawn.append(Panel(title, "prompt tokens", "ms", lines, log_x=True, log_y=True))
    drawn.append(_copy_panel(data["copies"]))
    drawn.append(_throughput_panel(data["throughput"]))
    talk = data["conversations"]
    lines = {
        name: (list(range(1, len(times) + 1)), [t * 1e3 for t in times])
        for name, times in talk["turns"].items()
    }
    drawn.append(Panel("Conversations, 4 × the device pool", "turn", "median TTFT, ms", lines))
    rates = {name: v["hit_rate"] * 100 for name, v in talk["variants"].items()}
    drawn.append(Panel("Hit rate of the conversations", "", "% of prompt tokens", bars=rates))
    writes = {
        f"{name}\n{words}": row["writes"]["amplification"][name]
        for words, row in (("4 × pool", talk), ("fits", data["roomy"]))
        for name in ("eager", "lazy", "disk")
    }
    drawn.append(Panel("Write amplification", "", "stored / computed", bars=writes))
    return drawn


def _throughput_panel(cost: dict[str, Any]) -> Panel:
    gains, spans = {}, {}
    for where, found in sides(cost):
        for figure, row in found["figures"].items():
            if not figure.startswith("tokens/s"):
                continue
            steps = ", step by step" if figure != "tokens/s" else ""
            estimate, name = row["eager_to_off"], f"{where}{steps}"
            gains[name] = (estimate["ratio"] - 1) * 100
            spans[name] = ((estimate["low"] - 1) * 100, (estimate["high"] - 1) * 100)
    title = "Throughput with offload, no hits"
    marks = {"goal": -LOSS_GOAL * 100}
    return Panel(title, "", "% more tokens/s than without", bars=gains, spans=spans, marks=marks)


def _measure_copies(quick: bool, folder: Path) -> None:
    watch = LoadWatch()
    data = {"date": today(), "machine": machine(), "quick": quick}
    data["copies"] = copy_speeds(offload_copies.QUICK if quick else offload_copies.FULL)
    data["load"] = watch.report()
    text = (
        f"# Copies between host pools\n\n{data['date']}, {data['machine']}. {data['load']['cores_used_by_others']:.2f} cores were "
        "taken by other programs. `python benchmarks/bench_offload.py --copies`."
    )
    write_document(
        folder, "offload_copies", text, [_copy_table(data["copies"])], [_copy_panel(data["copies"])], data
    )
    print((folder / "offload_copies.md").read_text())


def _copy_panel(rows: list[dict[str, Any]]) -> Panel:
    speeds: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        for method, ratio in row["backend_to"].items() if row["order"] == "scattered" else ():
            many = "" if row["threads"] == 1 else f", {row['threads']} threads"
            xs, ys = speeds.setdefault(f"{row['direction']} / {method}{many}", ([], []))
            xs.append(row["page_bytes"] / 1024)
            ys.append(ratio)
    marks = {"goal": COPY_GOAL}
    title = "Copy speed, scattered pages"
    return Panel(title, "page, KiB", "backend / yardstick", speeds, marks=marks, log_x=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 0 when the run is complete, whether or not a goal was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny models and sizes; the numbers mean nothing"
    )
    parser.add_argument("--rounds", type=int, help="of the parts with servers, instead of the usual numbers")
    parser.add_argument("--out", type=Path, help="folder of offload.{md,json,png}")
    parser.add_argument("--copies", action="store_true", help="the part about copies alone: offload_copies.*")
    args = parser.parse_args(arguments)
    folder_out = results_folder(args.out, args.quick)
    if args.copies:
        _measure_copies(args.quick, folder_out)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-offload-") as folder:
        data = measure(args.quick, args.rounds, Path(folder))
    write_document(folder_out, "offload", intro(data), tables(data), panels(data), data)
    print((folder_out / "offload.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
