"""Blocks of a shared pool that take several slots: they come and go whole, whoever dies; and what is alike takes room once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.offload_rig import full, mamba, prompt
from tests.helpers.rank_rig import RankRig
from tests.helpers.shared_engines import Killed, MiniEngine, key_of, shape
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.copy_backends import shared_host
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import SharedSegment
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.simple_kv_offload.selection import Selection
from vllm.v1.simple_kv_offload.transfer import Contents
from vllm.v1.simple_kv_offload.wide_blocks import WideBlocks

NARROW, WIDE = 0, 1
WIDTHS = (1, 3)
SIZE = shape(8, max_width=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segment"


def engine_at(path: Path, num_slots: int = 8) -> MiniEngine:
    return MiniEngine(path, shape(num_slots, max_width=3), widths=WIDTHS)


def store(engine: MiniEngine, number: int, group: int) -> bool:
    stored = engine.stage(key_of(number, group))
    if stored:
        engine.finish(len(engine.stores) - 1)
    return stored


def has(engine: MiniEngine, number: int, group: int) -> bool:
    found = engine.read(key_of(number, group))
    if found:
        engine.end_read(len(engine.reads) - 1)
    return found


def test_what_takes_several_slots_is_found_by_all_with_each_piece_in_its_place(path: Path) -> None:
    a, b = engine_at(path), engine_at(path)
    assert store(a, 1, WIDE)
    assert has(b, 1, WIDE)
    late = engine_at(path)
    assert has(late, 1, WIDE)
    (first,) = late.view()[0]
    assert a.slots_of(first) == b.slots_of(first) == late.slots_of(first)
    assert len(a.slots_of(first)) == 3


def test_a_block_is_gone_for_all_with_the_first_slot_that_it_loses(path: Path) -> None:
    a, b = engine_at(path), engine_at(path)
    assert store(a, 1, WIDE)
    assert store(a, 2, WIDE)
    assert store(a, 3, NARROW), "the last empty slot"
    assert store(b, 4, NARROW)
    assert not has(a, 1, WIDE)
    assert has(a, 2, WIDE)
    assert store(a, 5, NARROW)
    assert store(a, 6, NARROW)
    assert all(has(b, number, NARROW) for number in (3, 4, 5, 6)), "its other slots were empty"
    assert has(b, 2, WIDE)


def test_a_block_takes_the_slots_of_small_ones_wherever_they_lie(path: Path) -> None:
    engine = engine_at(path)
    for number in range(7):
        assert store(engine, number, NARROW)
    assert all(has(engine, number, NARROW) for number in (1, 3, 4, 6))
    assert store(engine, 8, WIDE)
    assert [has(engine, number, NARROW) for number in range(7)] == [n in (1, 3, 4, 6) for n in range(7)]
    (first,) = [slot for slot, key in engine.view()[0].items() if key == key_of(8, WIDE)]
    assert sorted(engine.slots_of(first)) == [1, 3, 6]


def test_no_slot_of_a_block_that_is_read_or_filled_is_taken(path: Path) -> None:
    a, b = engine_at(path), engine_at(path)
    assert store(a, 1, WIDE)
    assert b.read(key_of(1, WIDE))
    assert a.stage(key_of(2, WIDE))
    assert store(a, 3, NARROW)
    assert store(a, 4, NARROW), "over what was there just now"
    assert not a.stage(key_of(5, WIDE)), "one slot is free"
    assert not b.stage(key_of(5, WIDE))
    b.end_read(0)
    assert b.stage(key_of(5, WIDE))
    assert not has(a, 1, WIDE)
    a.finish(0)
    assert has(b, 2, WIDE)


@pytest.mark.parametrize("in_one_turn", [False, True])
def test_content_that_comes_back_to_the_same_first_slot_is_found_where_it_is_now(
    path: Path, in_one_turn: bool
) -> None:
    a, b = engine_at(path), engine_at(path)
    assert store(a, 1, WIDE)
    assert has(b, 1, WIDE)
    (before,) = a.view()[0]
    old = a.slots_of(before)
    with a.pool as pool:
        pool.evict_blocks([before])
        # The same first slot comes to the front, with others behind it.
        order = [before, *(slot for slot in range(1, 8) if slot not in old)]
        for slot in reversed(order):
            pool.touch([pool.blocks[slot]])
            pool.free_blocks([pool.blocks[slot]])
        if in_one_turn:
            assert a.stage(key_of(1, WIDE))
    if not in_one_turn:
        assert a.stage(key_of(1, WIDE))
    a.finish(len(a.stores) - 1)
    (now,) = a.view()[0]
    assert now == before
    assert set(a.slots_of(now)) != set(old)
    assert has(b, 1, WIDE), "with the right bytes"
    assert b.slots_of(now) == a.slots_of(now)


def test_a_failed_store_leaves_all_its_slots_empty_and_next_to_be_taken(path: Path) -> None:
    engine = engine_at(path)
    assert store(engine, 1, WIDE)
    assert engine.stage(key_of(2, WIDE))
    taken = set(engine.slots_of(engine.stores[0][0].blocks[0].block_id))
    engine.finish(0, ok=False)
    assert set(engine.order()[:3]) == taken
    assert store(engine, 3, WIDE)
    assert has(engine, 1, WIDE)


def _everything(engine: MiniEngine) -> None:
    for number, group in ((1, WIDE), (2, NARROW), (3, WIDE), (4, NARROW), (5, NARROW), (6, WIDE)):
        if engine.stage(key_of(number, group)):
            engine.finish(0, ok=number != 3)
    engine.read(key_of(6, WIDE))
    store(engine, 7, WIDE)
    engine.evict(1)
    if engine.reads:
        engine.end_read(0)
    engine.reset()
    assert store(engine, 8, WIDE)


def test_a_death_between_any_two_writes_leaves_whole_blocks_only(tmp_path: Path) -> None:
    num_deaths = 0
    while True:
        path = tmp_path / f"segment{num_deaths}"
        peer, victim = engine_at(path), engine_at(path)
        victim.kill_after(num_deaths)
        try:
            _everything(victim)
            break
        except Killed:
            victim.die()
        found, held = peer.view()
        assert not held, "what the dead one held is free"
        slots = [slot for first in found for slot in peer.slots_of(first)]
        assert len(slots) == len(set(slots)), "no slot is of two blocks"
        for first, key in found.items():
            assert len(peer.slots_of(first)) == WIDTHS[key[-1]]
            peer.check(first, key)
        _everything(peer)
        assert has(peer, 8, WIDE)
        heir = engine_at(path)
        assert heir.view() == peer.view()
        assert heir.order() == peer.order()
        peer.die()
        heir.die()
        path.unlink()
        num_deaths += 1
    assert num_deaths > 150


def test_what_a_dead_engine_was_reading_is_not_the_next_to_go(path: Path) -> None:
    a, b = engine_at(path), engine_at(path)
    assert store(a, 1, WIDE)
    assert store(a, 2, WIDE)
    assert b.read(key_of(1, WIDE))
    b.die()
    assert store(a, 3, NARROW)
    assert store(a, 4, NARROW)
    assert has(a, 1, WIDE)
    assert not has(a, 2, WIDE), "the older one"


def test_the_end_of_an_engine_reads_no_record_of_slots_that_it_does_not_hold(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large pool that would take longer than the others wait for the lock."""
    a, b = engine_at(path, num_slots=400), engine_at(path, num_slots=400)
    for number in range(100):
        assert store(a, number, WIDE)
    assert b.read(key_of(1, WIDE))
    read: list[int] = []
    original = SharedSegment.read
    monkeypatch.setattr(SharedSegment, "read", lambda self, slot: read.append(slot) or original(self, slot))
    b.segment.close()
    monkeypatch.undo()
    assert len(read) <= WIDTHS[WIDE]
    for number in range(100, 134):
        assert store(a, number, WIDE)
    assert has(a, 1, WIDE), "read last"
    assert not has(a, 0, WIDE)


def test_companions_of_a_held_block_do_not_change() -> None:
    engine_blocks = [object()] * 4
    wide = WideBlocks(engine_blocks, WIDTHS)  # type: ignore[arg-type]
    wide.join(1, (2, 3))
    wide.held.add(1)
    wide.part(1)
    assert wide.companions(1) == (2, 3)
    with pytest.raises(AssertionError, match="is held and gets other companions"):
        wide.join(1, (3,))


# Room


@pytest.fixture
def rigs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankRig]]:
    monkeypatch.setattr(shared_host, "DEFAULT_FOLDER", str(tmp_path))
    made: list[RankRig] = []
    yield made
    for rig in made:
        rig.close()


def latent() -> KVCacheSpec:
    return replace(full(), max_tp_shards=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_model_with_latents_and_states_takes_the_room_of_its_bytes(ranks: int, rigs: list[RankRig]) -> None:
    """Of each prompt 32 blocks are the same on all ranks, and the state after it is another on each."""
    num_prompts, num_blocks = 4, 32
    needed = num_prompts * (num_blocks + ranks)
    rig = RankRig([latent(), mamba()], ranks=ranks, held=False, device_blocks=80, host_blocks=1 + needed)
    rigs.append(rig)
    assert rig.manager.tier.num_parts == 1
    prompts = [prompt(4 * num_blocks + 1, seed) for seed in range(num_prompts)]
    for tokens in prompts:
        rig.generate(tokens, 1)
    for tokens in prompts:
        rig.evict_device()
        request = rig.generate(tokens, 1)
        assert request.num_external_computed_tokens == 4 * num_blocks
    assert rig.manager.tier.evictions == 0, "all of it fits, to the last slot"
    rig.assert_at_rest()


def test_a_piece_that_cannot_be_read_takes_its_block_with_it(rigs: list[RankRig]) -> None:
    """A rank names the slot that it has read, which may be a companion."""
    rig = RankRig([latent(), mamba()], ranks=2, held=False)
    rigs.append(rig)
    rig.generate(prompt(13), 1)
    tier = rig.manager.tier
    assert tier.shared is not None
    found = [block for block in tier.pool.blocks if tier.companions([block]) and block.block_hash]
    assert found
    narrow = next(block for block in tier.pool.blocks if block.block_hash and not tier.companions([block]))
    assert tier.groups_of([found[0], narrow], Contents.of([(), ()])) == [1, 0], (
        "also of what has lost its keys"
    )
    companion = tier.companions(found)[found[0].block_id][0]
    report = SimpleCPUOffloadWorkerMetadata(bad_cpu_blocks={companion})
    rig.manager.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert [block for block in found if block.block_hash is None] == found[:1]


def test_the_budget_counts_what_blocks_take(rigs: list[RankRig], tmp_path: Path) -> None:
    size, ranks = 64 << 20, 4
    specs = [
        spec.copy_with_new_block_size(1 << 14) for spec in (latent(), replace(full(), max_tp_shards=None))
    ]  # type: ignore[call-arg]
    rig = RankRig(specs, ranks=ranks, extra={"cpu_bytes_to_use": size, "num_cpu_blocks": None})
    rigs.append(rig)
    assert rig.manager.tier.geometry.slot_widths == (1, ranks)
    assert rig.manager.num_cpu_blocks == size // specs[0].page_size_bytes
    (segment,) = tmp_path.iterdir()
    assert 0.98 * size <= segment.stat().st_size <= 1.02 * size


def test_the_look_ahead_is_for_the_content_that_is_asked_about(rigs: list[RankRig]) -> None:
    """Also where it begins behind others that were chosen: two slots are too few for three ranks' states."""
    rig = RankRig([latent(), mamba()], ranks=3, host_blocks=4)
    rigs.append(rig)
    narrow, wide = key_of(1, NARROW), key_of(2, WIDE)
    selection = Selection(rig.manager.tier)
    assert len(selection.next_victims(wide)) == 3
    selection.add_plain(KVCacheBlock(1), narrow)
    selection.recheck_victims()
    assert not selection.next_victims(wide)
    selection.recheck_victims()
    assert len(selection.next_victims(narrow)) == 1


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("slots", [4, 5, 6, 7])
@pytest.mark.parametrize("own", [replace(full(), max_tp_shards=None), mamba()], ids=["heads", "states"])  # type: ignore[call-arg]
def test_stores_take_no_more_slots_than_there_are(
    own: KVCacheSpec, slots: int, lazy: bool, rigs: list[RankRig]
) -> None:
    rig = RankRig([latent(), own], ranks=3, host_blocks=slots, device_blocks=24, lazy=lazy)
    rigs.append(rig)
    for seed in range(3):
        rig.add(prompt(13, seed), 6)
    for step in range(60):
        if rig.scheduler.has_requests():
            rig.step(copies=False)
        if step % 4 == 3:
            for rank in range(3):
                rig.mover(rank).release()
    rig.run()
    assert rig.manager.store_side.ledger.done > 0
    rig.assert_at_rest()


def test_a_block_that_lost_a_slot_does_not_take_it_from_the_next_one_when_it_parts() -> None:
    wide = WideBlocks([KVCacheBlock(slot) for slot in range(8)], WIDTHS)
    wide.join(1, (2, 3))
    wide.join(4, (2, 5))
    wide.part(1)
    assert [wide.first_of(slot) for slot in (2, 3, 5)] == [4, 3, 4]
