"""The command line of `make bench`: what is asked for runs, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import run_all
from benchmarks.report import RESULTS, results_folder

SCRIPT = Path(run_all.__file__)


def commands(*arguments: str, status: int = 0) -> tuple[list[list[str]], list[str]]:
    """What would run, each as script and arguments, and what failed."""
    seen: list[list[str]] = []

    def start(command: list[str]) -> int:
        seen.append([Path(command[1]).name, *command[2:]])
        return status

    return seen, run_all.run(run_all.parse(arguments), start)


@pytest.mark.parametrize("arguments", [["--help"], ["list"]])
def test_asking_what_there_is_runs_nothing(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "==" not in done.stdout
    for name in run_all.BY_NAME:
        assert name in done.stdout


def test_all_run_in_order_without_a_choice() -> None:
    assert [command[0] for command in commands()[0]] == [f"bench_{name}.py" for name in run_all.BY_NAME]


def test_options_reach_those_that_know_them() -> None:
    seen, _ = commands("--rounds", "4", "--peer-python", sys.executable)
    by_script = {command[0]: command[1:] for command in seen}
    both = ["--rounds", "4", "--peer-python", sys.executable]
    assert by_script == {
        "bench_core.py": both,
        "bench_scheduler.py": [],
        "bench_offload.py": ["--rounds", "4"],
        "bench_serving.py": both,
    }


def test_a_choice_in_any_form_and_the_smallest_sizes() -> None:
    assert commands("--only", "serving", "--only", "core", "--quick", "--out", "x")[0] == [
        ["bench_core.py", "--quick", "--out", "x"],
        ["bench_serving.py", "--quick", "--out", "x"],
    ]
    assert [command[0] for command in commands("run", "--only", "scheduler,offload")[0]] == [
        "bench_scheduler.py",
        "bench_offload.py",
    ]


def test_progress_and_failures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, failed = commands("--only", "core,serving", status=3)
    assert failed == ["core", "serving"]
    shown = capsys.readouterr().out
    assert "== 1/2 core" in shown
    assert "== 2/2 serving failed with status 3" in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--only", "srving"], "srving"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--peer-python", "/no/such/python"], "/no/such/python"),
        (["serving"], "serving"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_all.main(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", run_all.BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_every_script_takes_what_it_is_given(benchmark: run_all.Benchmark) -> None:
    options = run_all.parse(["--quick", "--rounds", "1", "--peer-python", sys.executable, "--out", "x"])
    command = [*benchmark.command(options), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert all(word in told for word in command if word.startswith("--"))


def test_numbers_that_mean_nothing_never_replace_the_kept_results(tmp_path: Path) -> None:
    assert results_folder(None, quick=True) == RESULTS / "quick"
    assert results_folder(None, quick=False) == RESULTS
    assert results_folder(tmp_path, quick=True) == tmp_path
