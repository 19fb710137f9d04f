"""The simulator in the test suite: clean seeds, kept regressions, every mark reached, every mutant caught."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.sim import shrink
from tests.sim.__main__ import main
from tests.sim.batch import first_failure, run_batch
from tests.sim.driver import replay, run_seed
from tests.sim.marks import MARKS
from tests.sim.mutants import MUTANTS
from tests.sim.shrink import REGRESSIONS, load

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "design" / "architecture.md"
TICKS = 300
SEEDS = 500
MUTANT_SEEDS = 100
JOBS = min(4, os.cpu_count() or 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_seeds_are_clean_and_reach_every_mark() -> None:
    summary = run_batch(range(SEEDS), TICKS, JOBS)
    failures = "\n".join(
        f"python -m tests.sim --seed {s} --ticks {TICKS}: {m}" for s, m in summary.failures[:5]
    )
    assert not summary.failures, failures
    assert not MARKS - summary.marks.keys()


@pytest.mark.parametrize("path", sorted(REGRESSIONS.glob("*.json")), ids=lambda path: path.stem)
def test_regressions_stay_fixed(path: Path) -> None:
    seed, actions = load(path)
    failure = replay(seed, actions).failure
    assert failure is None, str(failure)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(name for name in MUTANTS if name != "none"))
def test_planted_bugs_are_caught(name: str) -> None:
    assert first_failure(range(MUTANT_SEEDS), TICKS, name) is not None, (
        f"{name} survived {MUTANT_SEEDS} seeds"
    )


def test_the_bugs_and_marks_that_the_architecture_names_are_there() -> None:
    text = " ".join(ARCHITECTURE.read_text().split())
    bugs = re.search(r"`mutants\*\.py` plant at least 12 bugs: (.*?)\. Each must", text)
    marks = re.search(r"`marks\.py` names rare situations \((.*?)\)", text)
    assert bugs is not None
    assert marks is not None
    named = bugs[1].split("; ")
    assert len(set(named)) >= 12
    assert set(named) <= MUTANTS.keys()
    assert set(marks[1].split(", ")) <= MARKS


def test_a_run_is_a_function_of_its_seed() -> None:
    first, second = run_seed(7, 120), run_seed(7, 120)
    assert first.actions == second.actions
    assert first.marks == second.marks


@pytest.mark.parametrize("flag", ["--seeds", "--ticks", "--jobs"])
def test_a_run_of_nothing_is_refused_instead_of_clean(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([flag, "0"])
    assert f"{flag} must be at least 1, got 0" in capsys.readouterr().err


def test_a_failing_run_is_shortened_while_it_fails_alike_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shrink, "REGRESSIONS", tmp_path)
    with MUTANTS["lose an event"]():
        failing = first_failure(range(MUTANT_SEEDS), 100, "lose an event")
        assert failing is not None
        failing = run_seed(failing.seed, 100)
        path = shrink.shrink_and_save(failing)
        seed, actions = load(path)
        again = replay(seed, actions).failure
    assert again is not None
    assert failing.failure is not None
    assert (again.code, path.name) == (failing.failure.code, f"{again.code.lower()}_seed_{seed}.json")
    assert len(actions) < len(failing.actions) // 2
    assert replay(seed, actions).failure is None, "without the bug the short list is clean"


def test_the_command_under_a_failure_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "4", "--jobs", "1", "--mutant", "lose an event"]) == 1
    command = next(line for line in capsys.readouterr().out.splitlines() if "python -m tests.sim" in line)
    assert main(shlex.split(command)[3:]) == 1
