"""The contract of all copy backends, on the one that needs a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.test_copy_backends import (
    FAULTY,
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


@pytest.fixture(params=["cuda_dma", FAULTY + "cuda_dma"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(request.param, tmp_path, torch.device("cuda", 0))
    yield bench
    bench.backend.shutdown()
