"""The small example connector: whose prefixes its folder takes for equal."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.kv_core import image, lora
from tests.helpers.offload_rig import rig_config
from tests.helpers.sched import Driver, full, make_request, make_scheduler
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import example_holds
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
)
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import RequestStatus

IDENTITIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "salt": ({"cache_salt": "one"}, {"cache_salt": "other"}),
    "salt or none": ({"cache_salt": "one"}, {}),
    "adapter": ({"lora_request": lora("n", 1, "/one")}, {"lora_request": lora("m", 2, "/other")}),
    "adapter or none": ({"lora_request": lora("n", 1, "/one")}, {}),
    "image": ({"mm_features": [image("one", 2, 3)]}, {"mm_features": [image("other", 2, 3)]}),
}


def holds(folder: Path) -> list[Path]:
    return list(folder.glob("held-*"))


class Engine:
    """Both halves of the connector, with a worker that saves whatever it is told to."""

    def __init__(self, folder: Path, model: str = "m") -> None:
        config = rig_config()
        config.model_config.model = model
        config.cache_config.block_size = 4
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(folder)},
        )
        self.worker = ExampleConnector(config, KVConnectorRole.WORKER)
        self.caches = {"layer0": torch.zeros(40, 4)}
        self.worker.register_kv_caches(self.caches)
        connector = ExampleConnector(config, KVConnectorRole.SCHEDULER)
        # Nothing is cached on the device, so that every hit is the connector's.
        scheduler = make_scheduler([full(4)], 40, connector=connector, enable_prefix_caching=False)
        self.driver = Driver(scheduler)

    def offered(self, name: str, length: int = 13, **identity: Any) -> int:
        """Tokens that a request of so many is offered; what it computes is saved."""
        features = identity.pop("mm_features", [])
        scheduler, worker = self.driver.scheduler, self.worker
        request = self.driver.add(name, range(length), max_tokens=1, **identity)
        request.mm_features = features
        output = scheduler.schedule()
        assert output.kv_connector_metadata is not None
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(None)
        worker.save_kv_layer("layer0", self.caches["layer0"], None)
        worker.wait_for_save()
        worker.clear_connector_metadata()
        return request.num_external_computed_tokens


@pytest.mark.parametrize("case", IDENTITIES)
def test_store_06_the_example_connector_keeps_other_identities_apart(case: str, tmp_path: Path) -> None:
    one, other = IDENTITIES[case]
    engine = Engine(tmp_path)
    hits = [engine.offered(f"r{i}", **identity) for i, identity in enumerate((one, other, one, other))]
    assert hits == [0, 0, 12, 12]
    again = Engine(tmp_path)
    assert again.offered("later", **one) == 12


def test_a_prompt_without_a_whole_block_is_not_stored(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv")
    assert [engine.offered(f"r{length}", length) for length in range(1, 5)] == [0, 0, 0, 0]
    assert not (tmp_path / "kv").exists()


def test_a_step_that_failed_leaves_no_half_of_a_prefix(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.driver.add("failed", range(9), max_tokens=1)
    orders = engine.driver.scheduler.schedule().kv_connector_metadata
    assert orders is not None
    engine.worker.bind_connector_metadata(orders)
    engine.worker.save_kv_layer("layer0", engine.caches["layer0"], None)
    assert len(list(tmp_path.iterdir())) == 1
    engine.worker.clear_connector_metadata()
    engine.offered("next", 2)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_a_failed_load_and_goes(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.offered("stored")
    (folder,) = tmp_path.iterdir()
    (folder / "layer0.safetensors").write_bytes(b"")
    assert engine.offered("loaded") == 12
    assert len(engine.worker.get_block_ids_with_load_errors()) == 3
    assert engine.worker.get_block_ids_with_load_errors() == set()
    assert list(tmp_path.iterdir()) == []


def test_an_error_before_any_step_takes_nothing_away_that_others_have_stored(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.offered("stored")
    engine.driver.add("refused", range(13), max_tokens=1)
    engine.driver.scheduler.finish_requests("refused", RequestStatus.FINISHED_ERROR)
    assert [engine.offered(name) for name in ("first", "second")] == [12, 12]
    engine.driver.scheduler.finish_requests("second", RequestStatus.FINISHED_ERROR)
    engine.offered("third", 2)
    assert list(tmp_path.iterdir()) == [], "an error behind a step makes what it has read suspect"


def test_a_folder_that_cannot_be_written_stores_nothing(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("no folder")
    assert [Engine(tmp_path / "kv").offered(name) for name in ("one", "two")] == [0, 0]


def test_a_prefix_that_could_not_be_written_is_not_begun_again_for_an_equal_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    for name in ("one", "two"):
        engine.driver.add(name, range(9), max_tokens=1)
    orders = engine.driver.scheduler.schedule().kv_connector_metadata
    assert orders is not None
    engine.worker.bind_connector_metadata(orders)
    engine.worker.save_kv_layer("layer0", engine.caches["layer0"], None)

    def fail_once(*args: Any) -> None:
        monkeypatch.undo()
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", fail_once)
    engine.worker.save_kv_layer("layer1", engine.caches["layer0"], None)
    engine.worker.save_kv_layer("layer2", engine.caches["layer0"], None)
    engine.worker.wait_for_save()
    assert list(tmp_path.iterdir()) == [], "a folder without its first layer would be offered"


def test_another_model_does_not_use_the_folder(tmp_path: Path) -> None:
    hits = [Engine(tmp_path, model).offered("r") for model in ("one", "other", "one", "other")]
    assert hits == [0, 0, 12, 12]


def test_other_weights_under_the_same_path_do_not_use_the_folder(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()

    def offered(weights: bytes) -> int:
        (model / "model.safetensors").write_bytes(weights)
        os.utime(model / "model.safetensors", (1.0, 1.0))
        return Engine(tmp_path / "kv", str(model)).offered("r")

    assert [offered(weights) for weights in (b"one", b"other", b"one", b"two")] == [0, 0, 12, 0]


def test_a_prompt_that_starts_again_is_never_saved_from_its_former_blocks(tmp_path: Path) -> None:
    """Preempted between two chunks, then found stored by another engine, whose folder goes while it decodes."""
    engine = Engine(tmp_path)
    scheduler = engine.driver.scheduler
    connector = scheduler.connector
    assert isinstance(connector, ExampleConnector)
    request = make_request(scheduler, "r", range(13))

    def saved(new: list[NewRequestData], cached: CachedRequestData, num_tokens: int) -> list[list[int]]:
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, output.scheduled_cached_reqs = new, cached
        output.num_scheduled_tokens = {"r": num_tokens}
        orders = connector.build_connector_meta(output).requests
        return [order.slot_mapping[::4] for order in orders if order.is_store]

    none = CachedRequestData.make_empty()
    assert saved([NewRequestData.from_request(request, ([1, 2, 3, 4],))], none, 8) == []
    Engine(tmp_path).offered("elsewhere")
    assert connector.get_num_new_matched_tokens(request, 0) == (12, False)
    connector.update_state_after_alloc(request, scheduler.kv_cache_manager.empty_kv_cache_blocks, 12)
    request.num_computed_tokens = 12
    assert saved([NewRequestData.from_request(request, ([5, 6, 7, 8],))], none, 1) == []
    (folder,) = (path for path in tmp_path.iterdir() if path not in holds(tmp_path))
    shutil.rmtree(folder)
    assert saved([], CachedRequestData(["r"], set(), [], {}, [None], [13], [1]), 1) == []


def test_a_reset_removes_what_is_stored_of_the_model_and_of_no_other(tmp_path: Path) -> None:
    engine, other = Engine(tmp_path), Engine(tmp_path, "other")
    assert [engine.offered("r"), other.offered("r")] == [0, 0]
    connector = engine.driver.scheduler.connector
    assert connector is not None
    assert engine.driver.scheduler.reset_connector_cache()
    withdrawal = connector.take_withdrawal()
    assert withdrawal is not None
    assert engine.worker.apply_withdrawal(withdrawal) is None
    assert connector.take_withdrawal() is None
    assert len(list(tmp_path.iterdir())) == 1
    assert [engine.offered(name) for name in ("again", "found")] == [0, 12]
    assert other.offered("s") == 12


def test_a_reset_that_nobody_carries_out_leaves_with_the_next_step(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.offered("r")
    engine.driver.scheduler.reset_connector_cache()
    assert [engine.offered(name) for name in ("again", "found")] == [0, 12]


def test_what_a_reset_cannot_remove_is_told_and_not_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    engine.offered("r")
    connector = engine.driver.scheduler.connector
    assert connector is not None
    engine.driver.scheduler.reset_connector_cache()
    withdrawal = connector.take_withdrawal()
    assert withdrawal is not None

    def refuse(*args: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "rename", refuse)
    assert "cannot be removed: read-only" in (engine.worker.apply_withdrawal(withdrawal) or "")
    assert [engine.offered(name) for name in ("again", "and again")] == [0, 0]


def test_a_prompt_under_way_at_a_reset_is_not_stored(tmp_path: Path) -> None:
    """Its first blocks are from before."""
    engine = Engine(tmp_path)
    connector = engine.driver.scheduler.connector
    assert connector is not None
    request = make_request(engine.driver.scheduler, "r", range(13))
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(request, ([1, 2, 3, 4],))]
    output.num_scheduled_tokens = {"r": 8}
    connector.build_connector_meta(output)
    connector.reset_cache()
    output.scheduled_new_reqs = []
    output.scheduled_cached_reqs = CachedRequestData(["r"], set(), [], {}, [None], [8], [0])
    orders = connector.build_connector_meta(output)
    assert isinstance(orders, ExampleConnectorMetadata)
    assert orders.requests == []


@pytest.mark.parametrize(
    ("tiers", "offered"), [([], 0), ([{"medium": "CPU"}], 0), ([{"medium": "STORAGE"}], 12), (None, 12)]
)
def test_a_request_loads_only_from_the_tiers_that_it_names(
    tiers: list[dict[str, str]] | None, offered: int, tmp_path: Path
) -> None:
    engine = Engine(tmp_path)
    engine.offered("stored")
    extra = {} if tiers is None else {"kv_transfer_params": {"load_tier_filter": tiers}}
    assert engine.offered("r", extra_args=extra) == offered


def test_what_a_request_that_ended_in_an_error_has_stored_goes(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    scheduler = engine.driver.scheduler
    engine.offered("good", 9)
    engine.offered("bad", 13)
    connector = scheduler.connector
    assert connector is not None
    assert connector.take_withdrawal() is None
    assert len(list(tmp_path.iterdir())) == 2
    scheduler.finish_requests("bad", RequestStatus.FINISHED_ERROR)
    withdrawal = connector.take_withdrawal()
    assert withdrawal is not None
    assert engine.worker.apply_withdrawal(withdrawal) is None
    assert engine.offered("as bad", 13) == 0
    assert engine.offered("as good", 9) == 8


# -- folders that other engines empty ---------------------------------------------------------------


def promised(engine: Engine, name: str = "r") -> Any:
    """A step with a load of three blocks, as it was ordered."""
    request = engine.driver.add(name, range(13), max_tokens=1)
    output = engine.driver.scheduler.schedule()
    assert request.num_external_computed_tokens == 12
    return output


def empty(folder: Path) -> None:
    """Another engine resets the folder."""
    other = Engine(folder)
    assert other.driver.scheduler.connector.reset_cache()
    withdrawal = other.driver.scheduler.connector.take_withdrawal()
    assert other.worker.apply_withdrawal(withdrawal) is None


def load(engine: Engine, output: Any) -> set[int]:
    """The step's load; returns the blocks that it failed for."""
    engine.worker.bind_connector_metadata(output.kv_connector_metadata)
    engine.worker.start_load_kv(None)
    engine.worker.clear_connector_metadata()
    return engine.worker.get_block_ids_with_load_errors()


def test_what_was_promised_is_loaded_though_another_engine_resets_the_folder_meanwhile(
    tmp_path: Path,
) -> None:
    first = Engine(tmp_path)
    first.caches["layer0"][:] = torch.arange(40).reshape(40, 1)
    assert first.offered("store") == 0
    written = first.caches["layer0"][[1, 2, 3]]
    engine = Engine(tmp_path)
    output = promised(engine)
    empty(tmp_path)
    assert [path for path in tmp_path.iterdir() if path not in holds(tmp_path)] == []
    assert load(engine, output) == set()
    blocks = output.scheduled_new_reqs[0].block_ids[0][:3]
    assert torch.equal(engine.caches["layer0"][list(blocks)], written)
    assert list(tmp_path.iterdir()) == [], "the hold ends with the load"
    assert engine.offered("again") == 0, "it is gone"


def test_a_folder_that_goes_during_the_look_up_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Engine(tmp_path).offered("store")
    engine = Engine(tmp_path)
    (folder,) = tmp_path.iterdir()
    original = os.link

    def link(source: Any, target: Any) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        original(source, target)

    monkeypatch.setattr(example_holds.os, "link", link)
    request = engine.driver.add("r", range(13), max_tokens=1)
    output = engine.driver.scheduler.schedule()
    assert request.num_external_computed_tokens == 0
    assert load(engine, output) == set()
    assert list(tmp_path.iterdir()) == []


def test_holds_end_with_those_who_do_not_load(tmp_path: Path) -> None:
    Engine(tmp_path).offered("store")
    engine = Engine(tmp_path)
    connector = engine.driver.scheduler.connector
    request = make_request(engine.driver.scheduler, "r", range(13))
    for _ in range(3):  # nobody has room for it yet
        assert connector.get_num_new_matched_tokens(request, 0) == (12, False)
        assert len(holds(tmp_path)) == 1
    connector.peek_matched_tokens(make_request(engine.driver.scheduler, "p", range(13)), 0)
    assert len(holds(tmp_path)) == 1
    connector.request_finished(request, [])
    assert holds(tmp_path) == []
    assert connector.get_num_new_matched_tokens(request, 0) == (12, False)
    connector.update_state_after_alloc(
        request, engine.driver.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0
    )
    assert holds(tmp_path) == [], "it was admitted without"
    assert connector.get_num_new_matched_tokens(request, 0) == (12, False)
    connector.reset_cache()
    assert holds(tmp_path) == []


@pytest.mark.parametrize("ends", ["step", "shutdown"])
def test_holds_of_a_step_that_failed_go_when_nobody_can_read_them(tmp_path: Path, ends: str) -> None:
    Engine(tmp_path).offered("store")
    engine = Engine(tmp_path)
    promised(engine)
    connector = engine.driver.scheduler.connector
    if ends == "shutdown":
        connector.shutdown()
        connector.shutdown()
    else:
        for _ in range(2):
            connector.build_connector_meta(SchedulerOutput.make_empty())
            assert len(holds(tmp_path)) == 1
        connector.build_connector_meta(SchedulerOutput.make_empty())
    assert holds(tmp_path) == []


def test_holds_of_engines_that_were_killed_go_at_the_next_start(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    host = os.uname().nodename
    dead = tmp_path / f"held-{host}-{int(child.stdout)}-0"
    kept = [tmp_path / f"held-{host}-{os.getpid()}-7", tmp_path / f"held-elsewhere-{int(child.stdout)}-0"]
    for folder in (dead, *kept):
        folder.mkdir()
    Engine(tmp_path)
    assert sorted(holds(tmp_path)) == sorted(kept)


def test_where_files_cannot_have_second_names_they_are_read_under_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    Engine(tmp_path).offered("store")
    monkeypatch.setattr(example_holds.os, "link", refuse)
    engine = Engine(tmp_path)
    output = promised(engine)
    assert holds(tmp_path) == []
    assert load(engine, output) == set()
    output = promised(engine, "again")
    empty(tmp_path)
    assert len(load(engine, output)) == 3, "as far as can be known, a load that fails"
