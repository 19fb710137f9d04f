"""What becomes of the reports of several workers that carry statistics, events or other counts than expected."""

from __future__ import annotations

import pytest

from tests.helpers.offload_rig import rig_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.prom_metrics import KVConnectorPromMetrics
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.simple_kv_offload.metrics import MetricName, SimpleCPUOffloadStats


def combine(aggregator: KVOutputAggregator, *reports: KVConnectorOutput) -> KVConnectorOutput:
    outputs = [ModelRunnerOutput([], {}, kv_connector_output=report) for report in reports]
    combined = aggregator.aggregate(outputs)
    assert combined is not None
    assert combined.kv_connector_output is not None
    return combined.kv_connector_output


def counted(number: int) -> SimpleCPUOffloadStats:
    stats = SimpleCPUOffloadStats()
    stats.increase_counter(MetricName.LOAD_BLOCKS, number)
    return stats


def test_statistics_of_all_ranks_add_up_and_a_silent_rank_adds_nothing() -> None:
    total = combine(
        KVOutputAggregator(3),
        KVConnectorOutput(kv_connector_stats=counted(2)),
        KVConnectorOutput(),
        KVConnectorOutput(kv_connector_stats=counted(3)),
    )
    assert total.kv_connector_stats is not None
    assert total.kv_connector_stats.aggregate(SimpleCPUOffloadStats()).data["data"] == counted(5).data["data"]


def test_a_count_that_the_workers_know_better_replaces_the_start_up_value() -> None:
    aggregator = KVOutputAggregator(3)
    told = combine(
        aggregator,
        KVConnectorOutput(finished_sending={"r"}, expected_finished_count=2),
        KVConnectorOutput(finished_sending={"r"}, expected_finished_count=2),
    )
    assert told.finished_sending == {"r"}
    assert told.expected_finished_count == 2


def test_a_metric_class_that_the_front_end_lacks_is_named() -> None:
    sink = KVConnectorPromMetrics(rig_config(), {}, [], {})
    with pytest.raises(KeyError, match="no metric class named 'Histogram'"):
        sink.make_metric("Histogram", "n", "d", [])
