"""The round trip that users of hybrid models need: device cache, CPU pool, resets and events, bit for bit."""

from __future__ import annotations

import time

from examples.kv_events import CacheIndex, Subscriber, prompt_hashes, rebuild, replay, snapshot
from examples.offload_roundtrip import (
    LOGPROB_TOLERANCE,
    block_size,
    check_events,
    full_blocks_below_last,
    logprob_rows,
    natural_prompts,
    random_prompt,
    roundtrip,
)
from tests.e2e_cpu.conftest import EventedServer

SCRATCH_KINDS = {"unknown", None}


def cacheable_groups(evented: EventedServer) -> set[int]:
    """Group ids whose spec can be cached, from the engine's own description of its groups."""
    groups = evented.server.request("GET", "/server_info?config_format=json").body["kv_cache_groups"]
    assert any(group["kind"] == "unknown" for group in groups), f"the model has no scratch group: {groups}"
    return {group["group_idx"] for group in groups if group["kind"] not in SCRATCH_KINDS}


def test_round_trip(glm_server: EventedServer) -> None:
    rows = roundtrip(glm_server.server)
    assert len(rows) == 8
    assert all(row.ok for row in rows), "\n".join(map(str, rows))


def test_logprobs_of_natural_text_are_equal_on_every_tier(glm_server: EventedServer) -> None:
    rows = logprob_rows(glm_server.server, natural_prompts())
    assert len(rows) == 4
    for row in rows:
        assert max(row.again, row.device_hit, row.cpu_hit) <= LOGPROB_TOLERANCE, row
        assert row.same_top1, row


def test_events_name_cacheable_groups_only_and_rebuild_the_cache(glm_server: EventedServer) -> None:
    server = glm_server.server
    server.wait_for_stores()
    assert server.reset(external=True)
    block = block_size(server)
    prompt = random_prompt(4 * block + 5, seed=77)
    server.complete(prompt, 4)
    server.wait_for_stores()
    index = rebuild(replay(glm_server.replay))
    assert check_events(index, cacheable_groups(glm_server)) == []

    # The full-attention group holds every full block of the prompt, in both tiers, chained from the root.
    chain = [e for e in index.stored if e["kv_cache_spec_kind"] in {"full_attention", "mla_attention"}]
    for medium in ("GPU", "CPU"):
        events = [e for e in chain if e["medium"] == medium and _tokens_of(e) and _is_part(prompt, e)]
        held = {h for e in events for h in e["block_hashes"] if h in index.hashes(medium, e["group_idx"])}
        assert len(held) >= full_blocks_below_last(len(prompt), block) // block, medium
    _assert_chains(index)

    # Who comes late knows the same from one answer, also of an engine that has nothing to do.
    ((_, (_, events, *_)),) = snapshot(glm_server.replay)
    late = rebuild([(0, [0.0, events, 0])])
    assert late.resident == index.resident
    assert check_events(late, cacheable_groups(glm_server)) == []

    assert server.reset(external=True)
    _wait_until_empty(glm_server)


def test_hashes_in_events_can_be_computed_from_what_the_server_says_of_them(
    glm_server: EventedServer,
) -> None:
    server = glm_server.server
    (source,) = server.request("GET", "/kv_event_sources").body.values()
    assert source["endpoint"] == glm_server.publish
    prompt = random_prompt(4 * block_size(server) + 5, seed=78)
    computed = prompt_hashes(prompt, source["block_hashes"])
    server.complete(prompt, 1)
    server.wait_for_stores()
    index = rebuild(replay(glm_server.replay))
    for event in index.stored:
        if _tokens_of(event) and prompt[: event["block_size"]] == event["token_ids"][: event["block_size"]]:
            units = event["block_size"] // source["block_hashes"]["hash_block_size"]
            count = len(event["block_hashes"])
            assert event["block_hashes"] == computed[units - 1 :: units][:count], event
    assert {computed[-1], computed[0]} & index.hashes("GPU"), (
        "at least the last full block of some group is there"
    )
    assert index.hashes("CPU") & set(computed)


def test_a_live_subscriber_sees_what_a_replay_returns(glm_server: EventedServer) -> None:
    subscriber = Subscriber(glm_server.publish)
    try:
        time.sleep(0.5)  # a SUB socket joins in the background
        start = len(replay(glm_server.replay))
        glm_server.server.complete(random_prompt(3 * block_size(glm_server.server), seed=5), 4)
        glm_server.server.wait_for_stores()
        wanted = replay(glm_server.replay)[start:]
        deadline = time.monotonic() + 10
        while len(subscriber.batches) < len(wanted) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert subscriber.batches[-len(wanted) :] == wanted
    finally:
        subscriber.close()


def _tokens_of(event: dict[str, object]) -> bool:
    return bool(event["token_ids"])


def _is_part(prompt: list[int], event: dict[str, object]) -> bool:
    tokens = event["token_ids"]
    assert isinstance(tokens, list)
    return any(prompt[i : i + len(tokens)] == tokens for i in range(len(prompt) - len(tokens) + 1))


def _assert_chains(index: CacheIndex) -> None:
    """A parent is the root or a hash stored earlier on some medium."""
    known: set[int | bytes] = set()
    for event in index.stored:
        parent = event["parent_block_hash"]
        assert parent is None or parent in known, event
        known |= set(event["block_hashes"])


def _wait_until_empty(evented: EventedServer) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        resident = rebuild(replay(evented.replay)).resident
        if not resident:
            return
        time.sleep(0.1)
    raise AssertionError(f"still resident after a full reset: {list(resident)[:5]}")
