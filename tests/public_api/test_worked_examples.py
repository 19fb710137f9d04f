"""The worked examples with numbers of the interface descriptions."""

from __future__ import annotations

import hashlib
import json
import pickle

import pytest
import torch

from tests.public_api.by_hand import (
    BLOCK,
    full,
    kv_config,
    mamba,
    manager,
    request,
    runner_output,
    scheduler,
    vllm_config,
    window,
)
from vllm.config import CacheConfig, KVEventsConfig, SchedulerConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, ZmqEventPublisher
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_readable_int
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.attention.backends.mla.indexer import KpoolTailBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.request import Request


def test_ring_slots() -> None:
    """Capacity 8, ring block 5, positions 6 to 9 → 46, 47, 40, 41; the null block is not written."""
    builder = KpoolTailBackend.get_builder_cls()(8)
    table = torch.tensor([[5], [0]], dtype=torch.int32)
    start = torch.tensor([0, 4, 5], dtype=torch.int32)
    made = builder.build(table, start, torch.tensor([6, 7, 8, 9, 3]))
    assert made.slot_mapping.tolist() == [46, 47, 40, 41, -1]
    assert KpoolTailBackend.get_name() == "KPOOL_TAIL"


def groups_of(num_full: int, num_window: int) -> list[list[str]]:
    config = vllm_config()
    specs = {f"f{i}": full() for i in range(num_full)} | {f"w{i}": window(32) for i in range(num_window)}
    return [group.layer_names for group in get_kv_cache_groups(config, specs)]


def test_uniform_page_groups() -> None:
    """10 full and 20 window layers → 3 groups of 10; 13 and 12 → one group each."""
    groups = groups_of(10, 20)
    assert [len(names) for names in groups] == [10, 10, 10]
    assert groups[1] == [f"w{i}" for i in range(0, 20, 2)]
    assert [len(names) for names in groups_of(13, 12)] == [13, 12]


def test_block_sizes_without_the_ring() -> None:
    """Full 16, window 32, ring 6: hash blocks of 16. The ring does not coarsen hits: 32 instead of 96."""
    ring = CircularBufferSpec(block_size=6, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = kv_config(full(16), window(64, 32), ring)
    assert resolve_kv_cache_block_sizes(config, vllm_config()) == (32, 16)
    assert resolve_kv_cache_block_sizes(kv_config(full(16)), vllm_config()) == (16, 16)


def test_hybrid_hit() -> None:
    """Blocks of 4, window 8, 5 cached full blocks, window blocks 1 and 2 only → hit 12, 8 beyond it."""
    specs = (
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32),
        SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=8),
    )
    kv = manager(kv_config(*specs, num_blocks=50), 4)
    made = request("a", list(range(21)), block_size=4)
    full_blocks = kv.block_pool.get_new_blocks(5)
    window_blocks = kv.block_pool.get_new_blocks(3)
    kv.block_pool.cache_full_blocks(made, full_blocks, 0, 5, 4, 0)
    kv.block_pool.cache_full_blocks(made, window_blocks, 1, 3, 4, 1)
    blocks, hit, uncached = kv.coordinator.find_longest_cache_hit(made.block_hashes, 20)
    assert (hit, uncached) == (12, 8)
    assert [b.block_id for b in blocks[0]] == [b.block_id for b in full_blocks[:3]]
    assert [b.block_id for b in blocks[1]] == [0, *(b.block_id for b in window_blocks[1:3])]


@pytest.mark.parametrize(("prompt_tokens", "cached"), [(40, 32), (32, 16)])
def test_cached_tokens(prompt_tokens: int, cached: int) -> None:
    """A repeated prompt of 40 tokens hits two blocks of 16; one of 32 hits one, as its last token is recomputed."""
    kv = manager(kv_config(num_blocks=50))
    first = request("a", list(range(prompt_tokens)))
    blocks, hit, _ = kv.get_computed_blocks(first)
    assert hit == 0
    kv.allocate_slots(first, prompt_tokens, hit, blocks)
    again = request("b", list(range(prompt_tokens)))
    blocks, hit, boundary = kv.get_computed_blocks(again)
    assert (hit, boundary) == (cached, 0)
    assert blocks.get_block_ids() == ([1, 2][: cached // BLOCK],)
    assert len(kv.get_computed_blocks_for_connector(again)) == 4
    assert kv.get_computed_blocks(again, max_cache_hit_length=15)[1] == 0


def test_align_chunks() -> None:
    """Blocks of 16, prompt 50, budget 40 → chunks of 32, 16 and 2; only the state at 48 can be hit."""
    limits = SchedulerConfig.default_factory(
        max_num_batched_tokens=40, max_num_seqs=4, max_model_len=8192, async_scheduling=False
    )
    config = vllm_config(scheduler_config=limits)
    config.cache_config.mamba_cache_mode = "align"
    kv = kv_config(full(), mamba(), num_blocks=100)
    sched = scheduler(config, kv)
    sched.add_request(request("a", list(range(50)), max_tokens=2))
    chunks = []
    for _ in range(3):
        output = sched.schedule()
        chunks.append(output.num_scheduled_tokens["a"])
        sched.update_from_output(output, runner_output(output, a=[] if sum(chunks) < 50 else [7]))
    assert chunks == [32, 16, 2]
    sched.add_request(request("b", list(range(50)), max_tokens=2))
    output = sched.schedule()
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [48]


def test_block_hashes_are_a_chain() -> None:
    """Every hash is the function of (parent or NONE_HASH, tokens, extra keys)."""
    init_none_hash(sha256)
    none_hash = kv_cache_utils.NONE_HASH

    def by_hand(value: object) -> bytes:
        return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()

    assert none_hash == by_hand("vllm-none-hash")
    first = hash_block_tokens(sha256, None, (1, 2), None)
    assert first == by_hand((none_hash, (1, 2), None))
    second = hash_block_tokens(sha256, first, [3, 4], (("cache_salt", "s"),))
    assert second == by_hand((first, (3, 4), (("cache_salt", "s"),)))
    for name, size in (("sha256", 32), ("sha256_cbor", 32), ("xxhash", 16), ("xxhash_cbor", 16)):
        assert len(get_hash_fn_by_name(name)((b"", (1,), None))) == size
    with pytest.raises(ValueError, match="md5"):
        get_hash_fn_by_name("md5")


def test_extra_keys() -> None:
    made = request("a", list(range(8)))
    made.cache_salt = "pepper"
    assert generate_block_hash_extra_keys(made, 0, 4, 0) == ((("cache_salt", "pepper"),), 0)
    assert generate_block_hash_extra_keys(made, 4, 8, 0) == (None, 0)
    tagged = [(("lora", "name", "path"), ("mm", "id", -3), ("cache_salt", "s")), None]
    assert to_event_extra_keys(tagged) == [("name", ("id", -3), "s"), None]
    assert to_event_extra_keys([]) is None


def test_lookahead_hashes_wait_for_the_tokens_behind_a_block() -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(4, sha256, 2)
    made = request("a", list(range(5)))
    fresh = Request("b", list(range(5)), made.sampling_params, None, block_hasher=hasher)
    assert len(fresh.block_hashes) == 0
    fresh.append_output_token_ids(5)
    assert list(fresh.block_hashes) == [hash_block_tokens(sha256, None, (0, 1, 2, 3), (None, 4, 5))]
    assert fresh._block_hasher is hasher


@pytest.mark.parametrize(("switch", "shown"), [(None, 258), ("1", 258), ("0", bytes(30) + b"\x01\x02")])
def test_event_hashes(monkeypatch: pytest.MonkeyPatch, switch: str | None, shown: object) -> None:
    if switch is None:
        monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)
    else:
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", switch)
    assert maybe_convert_block_hash(bytes(30) + b"\x01\x02") == shown


@pytest.mark.parametrize(
    ("endpoint", "rank", "moved"),
    [
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("inproc://cache", 1, "inproc://cache_dp1"),
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("inproc://cache", 0, "inproc://cache"),
    ],
)
def test_endpoints_of_ranks(endpoint: str, rank: int, moved: str) -> None:
    assert ZmqEventPublisher.offset_endpoint_port(endpoint, rank) == moved


def test_events_of_a_conversation() -> None:
    """Blocks of 4, prompt 1..9: [A, B] first, C once its last token is computed, C removed on re-use."""
    config = vllm_config(
        cache_config=CacheConfig(block_size=4),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    sched = scheduler(config, kv_config(full(4), num_blocks=5), block_size=4, hash_block_size=4)
    made = request("a", list(range(1, 10)), max_tokens=4, block_size=4)
    batches = []
    sched.kv_event_publisher.publish = batches.append  # type: ignore[method-assign]
    sched.add_request(made)
    token = 10
    while sched.has_unfinished_requests():
        output = sched.schedule()
        sched.update_from_output(output, runner_output(output, a=[token]))
        token += 1
    stored = [event for batch in batches for event in batch.events]
    assert [len(batch.events) for batch in batches] == [1, 1]
    assert all(isinstance(event, BlockStored) for event in stored)
    a, b, c = (maybe_convert_block_hash(h) for h in made.block_hashes)
    assert (stored[0].block_hashes, stored[0].parent_block_hash) == ([a, b], None)
    assert stored[0].token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (stored[0].block_size, stored[0].medium, stored[0].group_idx) == (4, "GPU", 0)
    assert stored[0].kv_cache_spec_kind == "full_attention"
    assert (stored[1].block_hashes, stored[1].parent_block_hash) == ([c], b)
    assert stored[1].token_ids == [9, 10, 11, 12]
    batches.clear()
    sched.add_request(request("b", list(range(100, 112)), max_tokens=1, block_size=4))
    output = sched.schedule()
    sched.update_from_output(output, runner_output(output))
    removed = [event for event in batches[0].events if isinstance(event, BlockRemoved)]
    assert (removed[0].block_hashes, removed[0].medium, removed[0].group_idx) == ([c], "GPU", 0)
    assert isinstance(batches[0].events[-1], BlockStored)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2m", 2_000_000), ("1G", 2**30), ("7", 7)],
)
def test_human_integers(text: str, value: int) -> None:
    assert human_readable_int(text) == value


def test_dotted_flags() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--kv-transfer-config", type=json.loads)
    parser.add_argument("--optimization-level", type=int)
    args = parser.parse_args(
        [
            "--kv-transfer-config.kv_role",
            "kv_both",
            "--kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use",
            "1073741824",
            "-O3",
        ]
    )
    assert args.kv_transfer_config == {
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824},
    }
    assert args.optimization_level == 3


def test_capacity_examples() -> None:
    """Memory of a window and of a chunk: the formulas of the description with in-flight tokens T and length L."""
    config = vllm_config()
    config.model_config.max_model_len = 1000
    config.scheduler_config.max_num_batched_tokens = 100
    config.scheduler_config.async_scheduling = False
    page = full().page_size_bytes
    assert full().max_memory_usage_bytes(config) == -(-1000 // 16) * page
    assert window(64).max_memory_usage_bytes(config) == (-(-(63 + 100) // 16) + 1) * page
    state = mamba().page_size_bytes
    assert mamba().max_memory_usage_bytes(config) == 2 * state
    assert isinstance(kv_config(), KVCacheConfig)
