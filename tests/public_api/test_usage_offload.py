"""The scheduler half of the simple CPU offload, constructed directly and driven with hand-made requests and steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.public_api.by_hand import BLOCK, full, kv_config, mamba, request, vllm_config, window
from vllm.config import KVEventsConfig, KVTransferConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.manager import BlockStoreMeta, SimpleCPUOffloadScheduler, StoreRequestState
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from vllm.v1.simple_kv_offload.metrics import INFO_LABELS, MetricName, SimpleCPUOffloadStats

AT_REST = (
    "_reqs_to_load _load_event_to_reqs _pending_cpu_hits _store_event_to_blocks _abandoned_store_event_to_blocks "
    "_store_event_to_reqs _pending_finished_stores _abandoned_reqs_to_load _in_flight_store_gpu_blocks "
    "_store_event_pending_counts"
)


def tensors(config: KVCacheConfig) -> KVCacheConfig:
    """The same config with memory behind it: one tensor per group, as sizing by bytes needs."""
    for group in config.kv_cache_groups:
        page = group.kv_cache_spec.page_size_bytes
        config.kv_cache_tensors.append(
            KVCacheTensor(
                size=page * config.num_blocks,
                layers=list(group.layer_names),
                layer_stride=0,
                block_stride=page,
            )
        )
    return config


@dataclass
class Outside:
    """What a test of the manager has at hand: a device pool of its own and nothing of the engine."""

    specs: tuple[KVCacheSpec, ...] = (full(),)
    device_blocks: int = 16
    cpu_blocks: int = 9
    lazy: bool = False
    events: bool = False
    workers: int = 1
    manager: SimpleCPUOffloadScheduler = field(init=False)
    pool: BlockPool = field(init=False)

    def __post_init__(self) -> None:
        config = tensors(kv_config(*self.specs, num_blocks=self.device_blocks))
        page = sum(tensor.size for tensor in config.kv_cache_tensors) // self.device_blocks
        self.manager = SimpleCPUOffloadScheduler(
            self.config(),
            config,
            cpu_capacity_bytes=page * self.cpu_blocks,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            lazy_offload=self.lazy,
        )
        self.pool = BlockPool(self.device_blocks, enable_caching=True, hash_block_size=BLOCK)
        self.manager.bind_gpu_block_pool(self.pool)

    def config(self) -> VllmConfig:
        limits = SchedulerConfig.default_factory(
            max_num_batched_tokens=64, max_num_seqs=16, max_model_len=8192, async_scheduling=False
        )
        return vllm_config(
            parallel_config=ParallelConfig(tensor_parallel_size=self.workers),
            scheduler_config=limits,
            kv_transfer_config=KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both"),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
            if self.events
            else None,
        )

    def computed(self, made: Request, num_blocks: int) -> tuple[list[int], ...]:
        """Give the request hashed device blocks in every group, as if they had been computed."""
        groups = []
        for group_id in range(len(self.specs)):
            blocks = self.pool.get_new_blocks(num_blocks)
            self.pool.cache_full_blocks(made, blocks, 0, num_blocks, BLOCK, group_id)
            groups.append(blocks)
        made.num_computed_tokens = num_blocks * BLOCK
        made.status = RequestStatus.RUNNING
        self.manager.update_state_after_alloc(made, KVCacheBlocks(tuple(groups)), 0)
        return tuple([block.block_id for block in blocks] for blocks in groups)

    def free(self, block_ids: tuple[list[int], ...]) -> None:
        for ids in block_ids:
            self.pool.free_blocks([self.pool.blocks[i] for i in reversed(ids)])

    def step(self, *new: tuple[Request, tuple[list[int], ...]], **scheduled: int) -> SimpleCPUOffloadMetadata:
        output = SchedulerOutput(
            scheduled_new_reqs=[NewRequestData.from_request(made, ids) for made, ids in new],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )
        return self.manager.build_connector_meta(output)

    def complete(self, event: int, count: int = 1) -> None:
        meta = SimpleCPUOffloadWorkerMetadata(completed_store_events={event: count})
        self.manager.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))

    def stored(self, prompt: list[int], num_blocks: int) -> Request:
        """A request whose blocks went to the CPU, ended, and left the device."""
        made = request(f"r{prompt[0]}", prompt)
        ids = self.computed(made, num_blocks)
        meta = self.step((made, ids), **{made.request_id: 1})
        self.complete(meta.store_event)
        made.status = RequestStatus.FINISHED_STOPPED
        self.manager.request_finished_all_groups(made, ids)
        self.free(ids)
        self.pool.reset_prefix_cache()
        return made

    def assert_at_rest(self) -> None:
        assert {
            name: getattr(self.manager, name) for name in AT_REST.split(" ") if getattr(self.manager, name)
        } == {}


def test_attributes() -> None:
    outside = Outside()
    made = outside.manager
    assert made.num_cpu_blocks == 9
    assert made.cpu_kv_cache_config.num_blocks == 9
    assert isinstance(made.cpu_coordinator, UnitaryKVCacheCoordinator)
    assert made.cpu_block_pool.get_num_free_blocks() == 8
    assert tuple(made.prefix_cacheable_group_ids) == (0,)
    assert made.enable_kv_cache_events is False
    assert made.kv_event_medium == "CPU"
    assert (made.fa_block_size, made.fa_gidx, list(made.group_block_sizes)) == (BLOCK, 0, [BLOCK])
    assert made._expected_worker_count == 1
    assert made._cursor is None
    assert made._reqs_to_store == {}
    assert made.has_pending_stores() is False
    outside.assert_at_rest()


def test_eager_store_and_load() -> None:
    outside = Outside()
    manager, pool = outside.manager, outside.pool
    made = request("a", list(range(40)))
    ids = outside.computed(made, 2)
    assert isinstance(manager._reqs_to_store["a"], StoreRequestState)
    meta = outside.step((made, ids), a=8)
    assert meta.store_event == 0
    assert meta.store_gpu_blocks == ids[0]
    assert len(meta.store_cpu_blocks) == 2
    assert (meta.load_event, meta.load_gpu_blocks) == (-1, [])
    assert manager._in_flight_store_gpu_blocks == set(ids[0])
    assert manager._store_event_to_blocks[0].gpu_block_ids == ids[0]
    assert manager._store_event_to_reqs == {0: ["a"]}
    assert [pool.blocks[i].ref_cnt for i in ids[0]] == [2, 2]
    assert manager.has_pending_stores()
    assert outside.step(a=0).store_event == -1
    outside.complete(0)
    assert [pool.blocks[i].ref_cnt for i in ids[0]] == [1, 1]
    assert manager.request_finished(made, ids[0]) == (False, None)
    outside.free(ids)
    outside.assert_at_rest()
    assert pool.reset_prefix_cache() is True

    again = request("b", list(range(33)))
    assert manager.get_num_new_matched_tokens(again, 0) == (32, True)
    pinned = manager._pending_cpu_hits["b"][0]
    assert [b.block_id for b in pinned[0]] == meta.store_cpu_blocks
    assert [b.ref_cnt for b in pinned[0]] == [1, 1]
    assert manager.get_num_new_matched_tokens(again, 0) == (32, True)
    targets = pool.get_new_blocks(3)
    manager.update_state_after_alloc(again, KVCacheBlocks((targets,)), 32)
    assert manager._pending_cpu_hits == {}
    assert manager._reqs_to_load["b"].load_event is None
    load = outside.step()
    assert (load.load_event, load.load_event_to_reqs) == (0, {0: ["b"]})
    assert load.load_gpu_blocks == [b.block_id for b in targets[:2]]
    assert load.load_cpu_blocks == meta.store_cpu_blocks
    assert manager._load_event_to_reqs == {0: ["b"]}
    assert manager._reqs_to_load["b"].transfer_meta.cpu_block_ids == meta.store_cpu_blocks
    assert [b.ref_cnt for b in targets] == [2, 2, 1]
    manager.update_connector_output(KVConnectorOutput(finished_recving={"b"}))
    assert [b.ref_cnt for b in targets] == [1, 1, 1]
    assert [b.ref_cnt for b in pinned[0]] == [0, 0]
    outside.assert_at_rest()


@pytest.mark.parametrize(("tokens", "hit"), [(33, 32), (32, 16), (16, 0)])
def test_lookup_leaves_a_token(tokens: int, hit: int) -> None:
    """A prompt of two blocks and a token → 32; exactly 32 tokens → 16."""
    outside = Outside()
    outside.stored(list(range(48)), 3)
    assert outside.manager.get_num_new_matched_tokens(request("x", list(range(tokens))), 0) == (hit, hit > 0)


def test_lookup_goes_on_behind_the_local_prefix_and_can_be_switched_off() -> None:
    outside = Outside()
    outside.stored(list(range(64)), 4)
    made = request("x", list(range(60)))
    assert outside.manager.get_num_new_matched_tokens(made, 16) == (32, True)
    assert outside.manager.get_num_new_matched_tokens(made, 7) == (0, False)
    made.skip_reading_prefix_cache = True
    assert outside.manager.get_num_new_matched_tokens(made, 16) == (0, False)
    outside.assert_at_rest()


def test_fewer_tokens_than_offered_may_be_accepted() -> None:
    outside = Outside()
    outside.stored(list(range(64)), 4)
    made = request("x", list(range(60)))
    assert outside.manager.get_num_new_matched_tokens(made, 0) == (48, True)
    targets = outside.pool.get_new_blocks(1)
    outside.manager.update_state_after_alloc(made, KVCacheBlocks((targets,)), 16)
    assert outside.step().load_gpu_blocks == [targets[0].block_id]
    assert outside.manager.cpu_block_pool.get_num_free_blocks() == 7


def test_a_load_outlives_its_request() -> None:
    outside = Outside()
    outside.stored(list(range(32)), 2)
    made = request("x", list(range(33)))
    outside.manager.get_num_new_matched_tokens(made, 0)
    targets = outside.pool.get_new_blocks(3)
    outside.manager.update_state_after_alloc(made, KVCacheBlocks((targets,)), 32)
    outside.step()
    made.status = RequestStatus.FINISHED_ABORTED
    assert outside.manager.request_finished_all_groups(made, ([b.block_id for b in targets],)) == (
        False,
        None,
    )
    outside.pool.free_blocks(reversed(targets))
    assert outside.manager._reqs_to_load["x"].finished is True
    assert [b.ref_cnt for b in targets] == [1, 1, 0]
    outside.manager.update_connector_output(KVConnectorOutput(finished_recving={"x"}))
    assert [b.ref_cnt for b in targets] == [0, 0, 0]
    outside.assert_at_rest()


def test_unknown_ids_in_reports_are_ignored() -> None:
    outside = Outside()
    outside.manager.update_connector_output(KVConnectorOutput(finished_recving={"?"}))
    outside.complete(99)
    outside.assert_at_rest()


def test_preempted_requests_start_over_and_copies_are_not_repeated() -> None:
    outside = Outside()
    made = request("a", list(range(40)))
    ids = outside.computed(made, 2)
    meta = outside.step((made, ids), a=8)
    outside.complete(meta.store_event)
    assert outside.step((made, ids), a=1).store_event == -1


def test_a_store_ends_when_every_worker_has_reported() -> None:
    outside = Outside(workers=2)
    assert outside.manager._expected_worker_count == 2
    made = request("a", list(range(40)))
    event = outside.step((made, outside.computed(made, 2)), a=8).store_event
    outside.complete(event)
    assert outside.manager._store_event_pending_counts == {event: 1}
    assert outside.manager.has_pending_stores()
    outside.complete(event)
    outside.assert_at_rest()
    merged = SimpleCPUOffloadWorkerMetadata({0: 1}).aggregate(SimpleCPUOffloadWorkerMetadata({0: 1, 1: 1}))
    assert merged.completed_store_events == {0: 2, 1: 1}


def test_reset_forgets_at_once_and_keeps_running_copies_pinned() -> None:
    outside = Outside()
    outside.stored(list(range(100, 132)), 2)
    made = request("a", list(range(40)))
    ids = outside.computed(made, 2)
    meta = outside.step((made, ids), a=8)
    assert outside.manager.reset() is False
    assert outside.manager._abandoned_store_event_to_blocks[meta.store_event].gpu_block_ids == ids[0]
    assert outside.manager._store_event_to_blocks == {}
    assert outside.manager.get_num_new_matched_tokens(request("x", list(range(100, 133))), 0) == (0, False)
    outside.complete(meta.store_event)
    assert outside.manager.get_num_new_matched_tokens(request("y", list(range(33))), 0) == (0, False)
    outside.assert_at_rest()
    assert outside.manager.reset() is True
    assert outside.manager._cursor is None


def test_the_prompt_of_a_finished_request_is_stored_before_its_blocks_go() -> None:
    outside = Outside()
    made = request("a", list(range(40)))
    ids = outside.computed(made, 2)
    outside.manager.request_finished_all_groups(made, ids)
    outside.free(ids)
    assert [m.gpu_block_ids for m in outside.manager._pending_finished_stores] == [ids[0]]
    assert [outside.pool.blocks[i].ref_cnt for i in ids[0]] == [1, 1]
    meta = outside.step()
    assert meta.store_gpu_blocks == ids[0]
    outside.complete(meta.store_event)
    outside.assert_at_rest()


def test_lazy_stores_walk_the_free_queue() -> None:
    """64 tokens of budget in blocks of 16 → 8 blocks are to be covered."""
    outside = Outside(lazy=True, device_blocks=9, cpu_blocks=16)
    assert outside.manager._target_free == 8
    config = kv_config(full(), window(32), mamba())
    assert SimpleCPUOffloadScheduler._estimate_lazy_target_blocks(config, 64) == 2 * (4 + 3 + 2)
    made = request("a", list(range(40)))
    ids = outside.computed(made, 2)
    assert outside.step((made, ids), a=8).store_event == -1
    outside.free(ids)
    meta = outside.step()
    assert sorted(meta.store_gpu_blocks) == sorted(ids[0])
    outside.complete(meta.store_event)
    assert outside.step().store_event == -1
    outside.pool.reset_prefix_cache()
    assert outside.manager.get_num_new_matched_tokens(request("x", list(range(33))), 0) == (32, True)


def test_selection_and_completion_by_hand() -> None:
    outside = Outside()
    manager = outside.manager
    made = request("a", list(range(40)))
    ids = outside.computed(made, 2)
    state = StoreRequestState(made, ids, [0])
    chosen, advance, meta = manager._select_eager_blocks_to_store(state, ids)
    assert (chosen, advance) == (ids[0], [2])
    assert meta is None
    gpu, cpu, owners = manager.prepare_store_specs(SchedulerOutput.make_empty())
    assert (gpu, cpu, owners) == ([], [], [])
    slots = manager.cpu_block_pool.get_new_blocks(2)
    outside.pool.touch([outside.pool.blocks[i] for i in ids[0]])
    manager._process_store_completion(ids[0], [slot.block_id for slot in slots])
    assert [slot.block_hash for slot in slots] == [outside.pool.blocks[i].block_hash for i in ids[0]]
    assert [slot.ref_cnt for slot in slots] == [0, 0]
    assert manager.get_num_new_matched_tokens(request("x", list(range(33))), 0) == (32, True)


def test_selection_with_events_describes_every_key() -> None:
    outside = Outside(events=True)
    made = request("a", list(range(40)))
    ids = outside.computed(made, 2)
    _, _, meta = outside.manager._select_eager_blocks_to_store(StoreRequestState(made, ids, [0]), ids)
    assert meta is not None
    assert [list(entry) for entry in meta] == [[outside.pool.blocks[i].block_hash] for i in ids[0]]
    (described,) = meta[1].values()
    assert isinstance(described, BlockStoreMeta)
    assert described.token_ids == list(range(16, 32))
    assert described.parent_block_hash == made.block_hashes[0]


def test_two_groups() -> None:
    outside = Outside(specs=(full(), window(32)), device_blocks=32, cpu_blocks=33)
    assert isinstance(outside.manager.cpu_coordinator, HybridKVCacheCoordinator)
    outside.stored(list(range(64)), 4)
    made = request("x", list(range(65)))
    assert outside.manager.get_num_new_matched_tokens(made, 0) == (64, True)
    groups = tuple(outside.pool.get_new_blocks(5) for _ in range(2))
    outside.manager.update_state_after_alloc(made, KVCacheBlocks(groups), 64)
    meta = outside.step()
    expected = {b.block_id for b in groups[0][:4]} | {b.block_id for b in groups[1][2:4]}
    assert set(meta.load_gpu_blocks) == expected


def test_events_of_the_tier() -> None:
    outside = Outside(events=True, cpu_blocks=3)
    outside.stored(list(range(32)), 2)
    events = list(outside.manager.take_events())
    assert [type(event) for event in events] == [BlockStored, BlockStored]
    assert [(e.medium, e.locality, e.token_ids, e.block_size) for e in events] == [
        ("CPU", "LOCAL", list(range(16)), 16),
        ("CPU", "LOCAL", list(range(16, 32)), 16),
    ]
    assert events[1].parent_block_hash == events[0].block_hashes[0]
    outside.stored(list(range(100, 132)), 2)
    kinds = [type(event) for event in outside.manager.take_events()]
    assert kinds.count(BlockRemoved) == 2
    assert kinds.count(BlockStored) == 2


def test_figures() -> None:
    outside = Outside()
    assert len(INFO_LABELS) == len(outside.manager._info_labelvalues)
    assert outside.manager._info_labelvalues == ("cpu", "false", "false", "9")
    outside.stored(list(range(32)), 2)
    stats = outside.manager.get_stats()
    assert isinstance(stats, SimpleCPUOffloadStats)
    assert stats.data["types"][MetricName.USED_BLOCKS] == "gauge"
    assert stats.data["data"][MetricName.USED_BLOCKS] == {(): 1}
    made = SimpleCPUOffloadStats(data={})
    assert made.is_empty()
    made.increase_counter("c", 2, ("x",))
    made.increase_counter("c", 1, ("x",))
    made.set_gauge("g", 5)
    assert made.data == {
        "types": {"c": "counter", "g": "gauge"},
        "data": {"c": {("x",): 3}, "g": {(): 5}},
    }
    other = SimpleCPUOffloadStats()
    other.increase_counter("c", 4, ("x",))
    assert made.aggregate(other).data["data"]["c"] == {("x",): 7}
    assert not made.is_empty()
    made.reset()
    assert made.is_empty()
    assert outside.manager.get_boundary_store_stats() == outside.manager.boundary_store_stats


@pytest.mark.parametrize("value", [True, 1.0, "3", 0, -1])
def test_block_counts_must_be_positive_integers(value: object) -> None:
    config = tensors(kv_config(num_blocks=8))
    with pytest.raises(ValueError, match="num_cpu_blocks"):
        SimpleCPUOffloadScheduler(Outside().config(), config, 10**6, BLOCK, BLOCK, num_cpu_blocks=value)  # type: ignore[arg-type]


def test_block_counts() -> None:
    def count(**changes: int) -> int:
        config = tensors(kv_config(num_blocks=8))
        page = full().page_size_bytes
        return SimpleCPUOffloadScheduler(
            Outside().config(), config, 6 * page, BLOCK, BLOCK, **changes
        ).num_cpu_blocks

    assert count() == 6
    assert count(aligned_num_cpu_blocks=4) == 4
    assert count(num_cpu_blocks=5, aligned_num_cpu_blocks=4) == 5
    with pytest.raises(ValueError, match="num_cpu_blocks"):
        count(num_cpu_blocks=7)
    assert count(disk_capacity_bytes=3 * full().page_size_bytes) == 3
