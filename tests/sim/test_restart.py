"""What a new engine may find on the disk of one that was killed: damage that whoever reads it notices, and nothing else wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from tests.sim.checkers import check_all
from tests.sim.checkers_end import check_rest
from tests.sim.device import Page
from tests.sim.driver import drain
from tests.sim.failure import SimFailure
from tests.sim.run import Run
from tests.sim.worlds import draw_params

ACTIONS = ("arrive", "schedule", "execute", "finish", "copy")


@pytest.fixture(params=["below the host", "in place of the host"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """A world without faults whose disk is kept, and on it what was stored."""
    in_place = request.param == "in place of the host"
    worlds = (draw_params(seed) for seed in count())
    params = next(each for each in worlds if each.disk_persist and each.disk is in_place)
    run = Run(replace(params, faults=frozenset(), store_threshold=0))
    places = count()
    while not all(table.rows for table in run.worker.kept):
        for name in ACTIONS:
            run.act(name, next(places))
            check_all(run)
    yield run
    run.close()


def _pages(run: Run) -> list[Page]:
    """What the last rank has of all that is kept."""
    memory = (run.worker.hosts if run.params.disk else run.worker.disks)[-1]
    return [memory.page(slot) for slot in run.worker.kept[-1].rows]


def test_damage_that_the_killed_engine_had_not_heard_of_is_no_failure(run: Run) -> None:
    for page in _pages(run):
        page.spoil()
    run.act("kill", 1_000)
    check_all(run)
    assert run.marks.counts["damage found again"]
    drain(run)
    check_rest(run)


@pytest.mark.parametrize("what", ["other bytes", "withdrawn"])
def test_wrong_bytes_that_no_read_notices_are_found_by_the_kill(run: Run, what: str) -> None:
    _change(_pages(run), what)
    with pytest.raises(SimFailure, match=r"\[I6\] the next engine finds disk slots"):
        run.act("kill", 1_000)


@pytest.mark.parametrize("what", ["other bytes", "withdrawn"])
def test_wrong_bytes_that_no_read_notices_are_found_in_what_came_back(run: Run, what: str) -> None:
    run.act("kill", 1_000)
    _change(_pages(run), what)
    with pytest.raises(SimFailure, match=r"\[I6\] rank \d, .* has a wrong row"):
        check_all(run)


def test_nothing_damaged_becomes_findable_later(run: Run) -> None:
    """Only a new engine finds what it did not write itself."""
    run.act("kill", 1_000)
    run.seen_entries = {name: [] for name, _, _ in run.lower_pools()}
    for page in _pages(run):
        page.spoil()
    with pytest.raises(SimFailure, match=r"\[I6\] rank \d, .* has a wrong row"):
        check_all(run)


def _change(pages: list[Page], what: str) -> None:
    for page in pages:
        if what == "withdrawn":
            page.spoil()
            page.tainted = True
        else:
            page.poison()
