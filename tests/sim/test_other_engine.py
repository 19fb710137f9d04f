"""What the other engine of a shared pool takes for wrong bytes, and what its medium tells it by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.sim.device import Page
from tests.sim.failure import SimFailure
from tests.sim.other_engine import OtherEngine
from tests.sim.run import Run
from tests.sim.worlds import draw_params
from vllm.v1.core.block_hash import BlockHash, get_group_id, make_block_hash_with_group_id

LAST_RANK = -1


@pytest.fixture
def run() -> Iterator[Run]:
    """A shared world of several ranks."""
    run = Run(next(params for params in map(draw_params, count()) if params.shared and params.ranks > 1))
    yield run
    run.close()


@pytest.fixture
def other(run: Run) -> OtherEngine:
    """It has stored a block and reads it."""
    other = run.other_engine()
    group, size = min(other.sizes.items())
    per_block = size // run.registry.unit
    for place in range(9):
        run.act("arrive", place)
    hashes = max((request.block_hashes for request in run.requests.values()), key=len)
    key = make_block_hash_with_group_id(BlockHash(hashes[per_block - 1]), group)
    assert other.stage(key)
    other.finish(0)
    assert other.read(key)
    return other


def _page(run: Run, other: OtherEngine) -> Page:
    """What the last rank reads now."""
    lease, key = other.reads[0]
    return run.worker.hosts[LAST_RANK].page_of(other.slots_of(lease.blocks[0].block_id), get_group_id(key))


def test_a_lost_block_is_found_out_and_dropped_for_all(run: Run, other: OtherEngine) -> None:
    _page(run, other).spoil()
    (_, key) = other.reads[0]
    assert other.read(key)  # it cannot know before
    other.end_read(1)
    assert key not in other.view()[0].values()
    assert run.observer().cached_block_hash_to_block.get_one_block(key) is None
    other.end_read(0)


def test_a_lost_block_is_right_again_once_it_is_written(run: Run, other: OtherEngine) -> None:
    page, (_, key) = _page(run, other), other.reads[0]
    page.spoil()
    other.end_read(0)
    assert other.stage(key)  # the slot that was dropped is the first to be taken again
    other.finish(0)
    assert other.read(key)
    assert _page(run, other) is page
    assert not page.bad


@pytest.mark.parametrize("what", ["other bytes", "withdrawn"])
def test_wrong_bytes_that_no_medium_tells_of_are_a_failure(run: Run, other: OtherEngine, what: str) -> None:
    page = _page(run, other)
    if what == "withdrawn":
        page.spoil()
        page.tainted = True
    else:
        page.poison()
    with pytest.raises(SimFailure, match=r"\[I6\] rank \d of another engine reads a wrong row"):
        other.end_read(0)
