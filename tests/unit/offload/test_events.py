"""What the lower tier tells the world: the same content as the device's events, once, and removals."""

from __future__ import annotations

import pytest

from tests.helpers.kv_core import lora
from tests.helpers.offload_rig import Rig, full, mamba, prompt, window
from vllm.distributed.kv_event_types import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash


def stored(rig: Rig, medium: str) -> list[BlockStored]:
    return [e for e in rig.publisher.events if isinstance(e, BlockStored) and e.medium == medium]


def split(events: list[BlockStored]) -> dict[tuple[object, int | None], tuple[object, ...]]:
    """(hash, group) → what the event says about that one hash."""
    found = {}
    for event in events:
        parent = event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            keys = None if event.extra_keys is None else event.extra_keys[i]
            found[block_hash, event.group_idx] = (
                parent, tokens, event.block_size, event.lora_id, event.lora_name, keys, event.kv_cache_spec_kind,
                event.kv_cache_spec_sliding_window,
            )  # fmt: skip
            parent = block_hash
    return found


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("specs", [[full()], [full(), window()], [full(8), mamba(8)]])
def test_evt_05_events_below_say_what_the_device_said(specs: list[object], lazy: bool) -> None:
    rig = Rig(specs=specs, device_blocks=24, host_blocks=64, lazy=lazy, events=True)  # type: ignore[arg-type]
    identities = [{}, {"cache_salt": "pepper"}, {"lora_request": lora("n", 3, "/p")}, {}, {}]
    for seed, identity in enumerate(identities):
        rig.generate(prompt(26, seed), max_tokens=3, **identity)
    device, below = split(stored(rig, "GPU")), split(stored(rig, "CPU"))
    assert {said[4] for said in below.values()} == {None, "n"}
    assert any(said[5] == ("pepper",) for said in below.values())
    for key, said in below.items():
        assert said == device[key]
        assert said[1], "tokens are known in either mode"
    assert all(event.locality == "LOCAL" for event in stored(rig, "CPU"))


def test_evt_05_removals_let_a_consumer_rebuild_the_index() -> None:
    rig = Rig(device_blocks=40, host_blocks=9, events=True)
    for seed in range(4):
        rig.generate(prompt(18, seed), max_tokens=3)
    index: dict[tuple[object, int | None], int] = {}
    for event in rig.publisher.events:
        if getattr(event, "medium", None) != "CPU":
            continue
        assert isinstance(event, BlockStored | BlockRemoved)
        change = 1 if isinstance(event, BlockStored) else -1
        for block_hash in event.block_hashes:
            key = (block_hash, event.group_idx)
            index[key] = index.get(key, 0) + change
    present = {key for key, count in index.items() if count}
    kept = rig.manager.tier.pool.cached_block_hash_to_block.blocks()
    keys = [block.block_hash for block in kept if block.block_hash is not None]
    assert present == {(maybe_convert_block_hash(get_block_hash(key)), get_group_id(key)) for key in keys}
    assert all(count in (0, 1) for count in index.values())
    assert len(present) == len(rig.manager.tier.pool.cached_block_hash_to_block) == 8


def test_evt_06_one_hash_per_block_not_per_hash_unit() -> None:
    rig = Rig(specs=[full(16), window(4, size=4)], device_blocks=40, host_blocks=40, events=True)
    assert rig.hash_block_size == 4
    request = rig.generate(prompt(33), max_tokens=2)
    events = [event for event in stored(rig, "CPU") if event.group_idx == 0]
    tails = [maybe_convert_block_hash(request.block_hashes[i]) for i in (3, 7)]
    assert [event.block_hashes for event in events] == [[tail] for tail in tails]
    assert [event.parent_block_hash for event in events] == [None, tails[0]]
    assert [list(event.token_ids) for event in events] == [prompt(33)[:16], prompt(33)[16:32]]
    assert [event.block_size for event in events] == [16, 16]


def test_evt_04_the_parent_is_the_block_before_even_if_it_was_stored_earlier() -> None:
    rig = Rig(events=True)
    first = rig.generate(prompt(8), max_tokens=1)
    longer = rig.generate(prompt(16), max_tokens=1)
    events = stored(rig, "CPU")
    parents = [event.parent_block_hash for event in events]
    hashes = [maybe_convert_block_hash(h) for h in longer.block_hashes]
    assert first.block_hashes[0] == longer.block_hashes[0]
    assert [event.block_hashes for event in events] == [[h] for h in hashes[:4]]
    assert parents == [None, *hashes[:3]]


def test_evt_04_a_block_that_is_there_already_is_still_the_parent_of_the_next() -> None:
    rig = Rig(events=True)
    request = rig.generate(prompt(12), max_tokens=1)
    pool = rig.manager.tier.pool
    lost = [rig.manager.tier.get(rig.key(request, i)) for i in (0, 2)]
    pool.evict_blocks({block.block_id for block in lost if block is not None})
    rig.publisher.events.clear()
    rig.generate(
        prompt(13), max_tokens=1
    )  # finds all three on the device; the first and the third are written anew
    hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
    said = [(event.block_hashes, event.parent_block_hash) for event in stored(rig, "CPU")]
    assert said == [([hashes[0]], None), ([hashes[2]], hashes[1])]


def test_evt_12_loaded_blocks_are_announced_when_they_become_hittable() -> None:
    rig = Rig(events=True)
    rig.generate(prompt(12), max_tokens=1)
    rig.evict_device()
    rig.step()
    before = list(rig.publisher.events)
    rig.publisher.events.clear()
    request = rig.add(prompt(17), max_tokens=1)
    for _ in range(3):
        rig.step(copies=False)
        assert stored(rig, "GPU") == [], "the bytes are not there yet"
    rig.run()
    rig.check_output(request)
    hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
    device = [h for event in stored(rig, "GPU") for h in event.block_hashes]
    assert device == hashes[:4]
    assert stored(rig, "GPU")[0].parent_block_hash is None
    # The whole stream, told again, gives what can be hit on the device, each once.
    hittable: list[object] = []
    for event in [*before, *rig.publisher.events]:
        if isinstance(event, AllBlocksCleared):
            hittable.clear()
        elif isinstance(event, BlockStored) and event.medium == "GPU":
            hittable += event.block_hashes
        elif isinstance(event, BlockRemoved) and event.medium == "GPU":
            for block_hash in event.block_hashes:
                hittable.remove(block_hash)
    pool = rig.scheduler.kv_cache_manager.block_pool
    kept = [block.block_hash for block in pool.cached_block_hash_to_block.blocks()]
    assert hittable == hashes[:4]
    assert set(hittable) == {maybe_convert_block_hash(get_block_hash(key)) for key in kept if key is not None}


def test_a_reset_tells_which_tier_was_cleared() -> None:
    rig = Rig(events=True)
    rig.generate(prompt(12), max_tokens=1)
    rig.publisher.events.clear()
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.step()
    assert AllBlocksCleared() in rig.publisher.events
    assert AllBlocksCleared(medium="CPU") in rig.publisher.events


def test_the_disk_tier_names_its_medium(tmp_path: object) -> None:
    rig = Rig(
        events=True,
        held=False,
        extra={
            "kv_offload_backend": "disk", "disk_path": f"{tmp_path}/kv", "disk_capacity_bytes": 1 << 20,
            "use_page_cache": True,
        },
    )  # fmt: skip
    rig.generate(prompt(12), max_tokens=1)
    assert stored(rig, "STORAGE")
    assert not stored(rig, "CPU")
    rig.close()


def test_evt_11_events_change_nothing_but_events() -> None:
    plain, evented = (Rig([full(), window()], events=events) for events in (False, True))
    assert plain.kv_config.num_blocks == evented.kv_config.num_blocks
    assert len(plain.kv_config.kv_cache_groups) == len(evented.kv_config.kv_cache_groups)
    for rig in (plain, evented):
        rig.generate(prompt(20), max_tokens=2)
    assert plain.publisher.events == []
    launched = [[(j.src_blocks, j.dst_blocks) for j in rig.mover().launched] for rig in (plain, evented)]
    assert launched[0] == launched[1]
