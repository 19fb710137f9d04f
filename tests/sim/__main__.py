"""`python -m tests.sim --seeds N --ticks 300 [--seed S]`: run seeds, or one seed, and say how to replay a failure."""

from __future__ import annotations

import argparse
import shlex
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.batch import Summary, run_batch
from tests.sim.driver import Result, run_seed
from tests.sim.marks import MARKS
from tests.sim.mutants import MUTANTS
from tests.sim.shrink import shrink_and_save


def replay_command(seed: int, ticks: int, mutant: str | None = None) -> str:
    """The one command that repeats a failure, also that of a planted bug."""
    planted = f" --mutant {shlex.quote(mutant)}" if mutant else ""
    return f"python -m tests.sim --seed {seed} --ticks {ticks}{planted}"


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 if every seed is clean."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds, from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ticks", type=int, default=300, help="actions per seed")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug")
    parser.add_argument("--shrink", action="store_true", help="shorten a failure and keep it as a regression")
    options = parser.parse_args(arguments)
    for name in ("seeds", "ticks", "jobs"):
        # Nothing that is run is nothing that fails: it would look clean.
        if vars(options)[name] < 1:
            parser.error(f"--{name} must be at least 1, got {vars(options)[name]}")
    console = Console()
    if options.seed is not None:
        return _run_one(console, options)
    return _run_many(console, options)


def _run_one(console: Console, options: argparse.Namespace) -> int:
    with MUTANTS[options.mutant]() if options.mutant else MUTANTS["none"]():
        result = run_seed(options.seed, options.ticks)
        console.print(f"seed {options.seed}: {result.ticks} ticks, {result.requests} requests")
        if result.failure is None:
            console.print("[green]clean[/green]")
            return 0
        console.print(f"[red]{result.failure}[/red]", highlight=False)
        for name, place in result.actions[-12:]:
            console.print(f"  {place:4} {name}", highlight=False)
        if options.shrink:
            path = shrink_and_save(result)
            console.print(f"kept as {path}")
    return 1


def _run_many(console: Console, options: argparse.Namespace) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    seeds = range(options.first, options.first + options.seeds)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seeds", total=options.seeds)

        def on_seed(result: Result) -> None:
            progress.advance(task)
            if result.failure is not None:
                progress.console.print(f"[red]seed {result.seed}[/red]: {result.failure}", highlight=False)

        summary = run_batch(seeds, options.ticks, options.jobs, mutant=options.mutant, on_seed=on_seed)
    _print_summary(console, summary, options)
    return 1 if summary.failures else 0


def _print_summary(console: Console, summary: Summary, options: argparse.Namespace) -> None:
    console.print(
        f"{summary.seeds} seeds, {summary.ticks} ticks, {summary.requests} requests, "
        f"{summary.seconds:.0f} s ({summary.ticks / max(summary.seconds, 1e-9):.0f} ticks/s)"
    )
    missing = sorted(MARKS - summary.marks.keys())
    console.print(
        f"marks: {len(MARKS) - len(missing)} of {len(MARKS)} reached"
        + (f"; never: {missing}" if missing else "")
    )
    for code, count in sorted(summary.codes.items()):
        console.print(f"[red]{code}: {count} seeds[/red]")
    for seed, message in summary.failures[:10]:
        console.print(f"[red]seed {seed}[/red]: {message}", highlight=False)
        console.print(f"    {replay_command(seed, options.ticks, options.mutant)}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
