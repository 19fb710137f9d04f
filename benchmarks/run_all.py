"""`make bench`: the benchmarks in turn, or the chosen ones, each with the options that mean something to it.

`make bench ARGS='list'` names them; `make bench ARGS='--only serving --rounds 3 --peer-python PYTHON'` chooses.
Each prints its tables; those of core (with a peer or --out), offload and serving also write tables and plots below
benchmarks/results/, with --quick below benchmarks/results/quick/, with --out into that folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Benchmark:
    """A script, what it measures, how long it takes about, and its own form of the common options."""

    name: str
    about: str
    duration: str
    takes_rounds: bool = True
    takes_peer: bool = False
    quick: tuple[str, ...] = ()

    def command(self, options: argparse.Namespace) -> list[str]:
        """The command line of one run."""
        arguments = [sys.executable, str(HERE / f"bench_{self.name}.py")]
        if options.quick:
            arguments += self.quick
        if options.rounds is not None and self.takes_rounds:
            arguments += ["--rounds", str(options.rounds)]
        if options.peer_python is not None and self.takes_peer:
            arguments += ["--peer-python", options.peer_python]
        if options.out is not None and "--quick" in self.quick:
            arguments += ["--out", str(options.out)]
        return arguments


BENCHMARKS = (
    Benchmark(
        "core",
        "the KV core by itself: hash, look-up, evicting allocation, a step, memory",
        "3 min",
        takes_peer=True,
        quick=("--quick",),
    ),
    Benchmark(
        "scheduler",
        "a step of the scheduler in its two halves, plain and with look-ahead",
        "1 min",
        takes_rounds=False,
        quick=("--requests", "16", "--steps", "20"),
    ),
    Benchmark(
        "offload",
        "time to first token per tier, copies, throughput, conversations, writes",
        "15 min",
        quick=("--quick",),
    ),
    Benchmark(
        "serving",
        "a server from start to requests per second, and its scheduler, beside a peer",
        "3 min a round",
        takes_peer=True,
        quick=("--quick",),
    ),
)
BY_NAME = {benchmark.name: benchmark for benchmark in BENCHMARKS}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the program for what is wrong with it."""
    parser = argparse.ArgumentParser(
        prog="run_all.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["run", "list"], default="run")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME[,NAME]",
        help=f"of {', '.join(BY_NAME)}; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="the smallest sizes; the numbers mean nothing")
    parser.add_argument("--rounds", type=int, help="instead of each benchmark's own number")
    parser.add_argument("--peer-python", help="interpreter of an environment with the peer engine")
    parser.add_argument("--out", type=Path, help="folder of what core, offload and serving write")
    options = parser.parse_args(arguments)
    options.only = [name for given in options.only for name in given.split(",") if name]
    for name in options.only:
        if name not in BY_NAME:
            parser.error(f"--only: no benchmark {name!r}; choose from {', '.join(BY_NAME)}")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.peer_python is not None and not Path(options.peer_python).is_file():
        parser.error(f"--peer-python: no file {options.peer_python}")
    return options


def show_list() -> None:
    """Names, times and what is measured."""
    for benchmark in BENCHMARKS:
        print(f"{benchmark.name:10} about {benchmark.duration}: {benchmark.about}")


def run(options: argparse.Namespace, start: Callable[[list[str]], int]) -> list[str]:
    """Runs the chosen benchmarks, all of them without a choice; the names of those that failed."""
    chosen = [b for b in BENCHMARKS if not options.only or b.name in options.only]
    failed = []
    for number, benchmark in enumerate(chosen, 1):
        print(f"== {number}/{len(chosen)} {benchmark.name} (about {benchmark.duration})", flush=True)
        started = time.monotonic()
        status = start(benchmark.command(options))
        failed += [benchmark.name] if status else []
        ended = f"failed with status {status}" if status else "done"
        print(
            f"== {number}/{len(chosen)} {benchmark.name} {ended} after {time.monotonic() - started:.0f} s",
            flush=True,
        )
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 if a benchmark failed."""
    options = parse(arguments)
    if options.action == "list":
        show_list()
        return 0
    failed = run(options, lambda command: subprocess.run(command, check=False).returncode)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
