"""What the fake device must notice, and what it must not take for a fault."""

from __future__ import annotations

import pytest

from tests.sim.content import Chain, root
from tests.sim.device import Memory, Rows, forward
from tests.sim.failure import SimFailure
from tests.sim.kinds import make_groups
from tests.sim.params import Byte
from vllm.v1.kv_cache_interface import FullAttentionSpec, HiSparseHotSpec, MambaSpec

FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype=Byte())
HOT = HiSparseHotSpec(block_size=4, page_size=32, blocks_per_request=2)


def rows(name: str, full: list[int], hot: list[int], *, start: int = 0, shadowed: bool = False) -> Rows:
    """Eight tokens from `start` on, the same for every request."""
    return Rows(name, Chain(root(None, None), [1] * 8), [full, hot], start, 8, shadowed=shadowed)


def test_scratch_of_a_request_that_read_what_a_failed_step_left_out_is_still_its_own() -> None:
    batch = [rows("r1", [1, 2], [3, 4], start=4, shadowed=True), rows("r2", [5, 6], [7, 8])]
    forward(Memory(9), make_groups([FULL, HOT], 1), batch)
    assert [r.void for r in batch] == [True, False]


@pytest.mark.parametrize("start", [0, 4], ids=["right bytes", "nonsense"])
@pytest.mark.parametrize("hot", [[7, 3], [3, 4], [4, 3]], ids=["one block", "all", "other way round"])
def test_shared_scratch_is_noticed_also_between_equal_requests(start: int, hot: list[int]) -> None:
    batch = [
        rows("r1", [1, 2], [3, 4], start=start, shadowed=start > 0),
        rows("r2", [5, 6], hot, start=start, shadowed=start > 0),
    ]
    with pytest.raises(SimFailure, match=r"shares block \d of its scratch"):
        forward(Memory(9), make_groups([FULL, HOT], 1), batch)


def state_step(start: int, end: int, drafts: list[int], *, state_end: int, state_row: int) -> Rows:
    """A step of a request whose states may lie in blocks 1 to 5."""
    chain = Chain(root(None, None), [1] * 9)
    return Rows(
        "r",
        chain,
        [[1, 2, 3, 4, 5]],
        start,
        end,
        drafts=drafts,
        counted_end=end,
        state_end=state_end,
        state_row=state_row,
    )


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_step_goes_on_from_the_row_of_the_last_draft_that_was_right(accepted: int) -> None:
    states = MambaSpec(4, ((8,),), (Byte(),), mamba_cache_mode="align", num_speculative_blocks=2)
    memory, groups = Memory(6), make_groups([states], 1)
    forward(memory, groups, [state_step(0, 2, [], state_end=0, state_row=0)])
    drafted = state_step(2, 5, [1, 1], state_end=2, state_row=0)
    forward(memory, groups, [drafted])
    groups[0].accept(memory, drafted, accepted)
    for row in range(3):
        step = state_step(3 + accepted, 4 + accepted, [], state_end=5, state_row=row)
        if row == accepted:
            groups[0].before(memory, step)
        else:
            with pytest.raises(SimFailure, match="another prefix"):
                groups[0].before(memory, step)
    at_block_end = memory.page(1).read(0, 0) == drafted.stamp(0, 4, 0)
    assert at_block_end == (accepted >= 1), (
        "the state after four tokens is brought to the first column once it is right"
    )
