"""`python -m tests.sim --seeds N --ticks 300 [--seed S]`: run seeds, or one seed, and say how to replay a failure."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.batch import Summary, run_batch
from tests.sim.driver import Action, Result, replay, run_seed
from tests.sim.marks import MARKS
from tests.sim.mutants import MUTANTS
from tests.sim.shrink import load, shrink_and_save


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
        _say(console, f"[red]{escape(str(result.failure))}[/red]")
        _print_actions(console, result.actions[-12:])
        if options.shrink:
            path = shrink_and_save(result)
            seed, actions = load(path)
            _say(
                console, f"shortened to {len(actions)} actions: {escape(str(replay(seed, actions).failure))}"
            )
            _print_actions(console, actions)
            _say(console, f"kept as {path}")
            if not options.mutant:  # else it is clean, as it must stay
                _say(console, f"    python -m pytest tests/sim/test_simulator.py -k {path.stem}")
    return 1


def _say(console: Console, text: str) -> None:
    """One line, however long: a wrapped message or command cannot be searched for or copied."""
    console.print(text, highlight=False, soft_wrap=True)


def _print_actions(console: Console, actions: Sequence[Action]) -> None:
    for name, place in actions:
        _say(console, f"  {place:4} {name}")


def _run_many(console: Console, options: argparse.Namespace) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    seeds = range(options.first, options.first + options.seeds)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seeds", total=options.seeds)

        def on_seed(result: Result) -> None:
            progress.advance(task)
            if result.failure is not None:
                _say(progress.console, f"[red]seed {result.seed}[/red]: {escape(str(result.failure))}")

        summary = run_batch(seeds, options.ticks, options.jobs, mutant=options.mutant, on_seed=on_seed)
    _print_summary(console, summary, options)
    return 1 if summary.failures else 0


def _print_summary(console: Console, summary: Summary, options: argparse.Namespace) -> None:
    console.print(
        f"{summary.seeds} seeds, {summary.ticks} ticks, {summary.requests} requests, "
        f"{summary.seconds:.0f} s ({summary.ticks / max(summary.seconds, 1e-9):.0f} ticks/s)"
    )
    missing = sorted(MARKS - summary.marks.keys())
    never = f"; never: {', '.join(missing)}" if missing else ""
    _say(console, f"marks: {len(MARKS) - len(missing)} of {len(MARKS)} reached{never}")
    for code, count in sorted(summary.codes.items()):
        console.print(f"[red]{code}: {count} seeds[/red]")
    for seed, message in summary.failures[:10]:
        _say(console, f"[red]seed {seed}[/red]: {escape(message)}")
        _say(console, f"    {replay_command(seed, options.ticks, options.mutant)}")


if __name__ == "__main__":
    sys.exit(main())
