"""The contract of all copy backends, on the one that needs a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.test_copy_backends import (
    FAULTY,
    WIDTHS,
    Bench,
    test_a_store_reads_after_its_wait_event,
    test_after_shutdown_jobs_fail_at_once,
    test_an_empty_copy_is_over_at_once,
    test_an_exception_while_waiting_is_a_failed_result,
    test_bad_block_ids_are_a_failed_result,
    test_bytes_come_back_as_they_were,
    test_jobs_of_one_direction_keep_their_order,
    test_no_thread_is_left_behind,
    test_source_and_target_must_pair_up,
    test_the_caller_may_reuse_its_lists,
)
from vllm.v1.simple_kv_offload.copy_backends.cuda_gather import SMALL_BLOCK_BYTES

__all__ = [
    "test_a_store_reads_after_its_wait_event",
    "test_after_shutdown_jobs_fail_at_once",
    "test_an_empty_copy_is_over_at_once",
    "test_an_exception_while_waiting_is_a_failed_result",
    "test_bad_block_ids_are_a_failed_result",
    "test_bytes_come_back_as_they_were",
    "test_jobs_of_one_direction_keep_their_order",
    "test_no_thread_is_left_behind",
    "test_source_and_target_must_pair_up",
    "test_the_caller_may_reuse_its_lists",
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


# By a kernel where it is built, by the copy engines, by both for one block; the last of a width that no word fits into.
ALL_WIDTHS = {
    "small": WIDTHS,
    "large": {"a": SMALL_BLOCK_BYTES + 16, "b": 3 * SMALL_BLOCK_BYTES},
    "both": {"a": 64, "b": 2 * SMALL_BLOCK_BYTES},
    "odd": {"a": 63, "b": SMALL_BLOCK_BYTES + 1},
}


@pytest.fixture(
    params=[(kind, widths) for kind in ("cuda_dma", FAULTY + "cuda_dma") for widths in ALL_WIDTHS]
)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    kind, widths = request.param
    bench = Bench(kind, tmp_path, torch.device("cuda", 0), ALL_WIDTHS[widths])
    yield bench
    bench.close()
