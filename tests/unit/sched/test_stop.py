"""When a request stops."""

from __future__ import annotations

import time
from typing import Any

import pytest

from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.core.sched.utils import check_sequence_repetition, check_stop, remove_all
from vllm.v1.request import Request, RequestStatus

EOS = 99


def running(outputs: list[int], **params: Any) -> Request:
    sampling = SamplingParams(**params)
    sampling.update_from_generation_config({}, EOS)
    request = Request("r", [1, 2, 3], sampling, None, arrival_time=0.0)
    request.status = RequestStatus.RUNNING
    request.append_output_token_ids(outputs)
    return request


def test_end_of_sequence_stops() -> None:
    request = running([5, EOS])
    assert check_stop(request, 100)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason is None


def test_ignored_end_of_sequence_does_not_stop() -> None:
    assert not check_stop(running([5, EOS], ignore_eos=True), 100)


def test_a_stop_token_is_named_as_the_reason() -> None:
    request = running([5, 42], stop_token_ids=[42])
    assert check_stop(request, 100)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == 42


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(2, 100), (10, 5)])
def test_both_length_limits_cap(max_tokens: int, max_model_len: int) -> None:
    request = running([5, 6], max_tokens=max_tokens)
    assert check_stop(request, max_model_len)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_repetition_stops_only_after_min_tokens() -> None:
    detector = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=3)
    early = running([7, 7, 7], repetition_detection=detector, min_tokens=5, max_tokens=50)
    assert not check_stop(early, 100)
    late = running([1, 4, 7, 8, 7, 8, 7, 8], repetition_detection=detector, min_tokens=5, max_tokens=50)
    assert check_stop(late, 100)
    assert late.status is RequestStatus.FINISHED_REPETITION
    assert late.stop_reason == "repetition_detected"


def test_a_request_without_output_goes_on() -> None:
    assert not check_stop(running([]), 100)


@pytest.mark.parametrize(
    ("tokens", "sizes", "count", "found"),
    [
        ([1, 1, 1], (1, 1), 3, True),
        ([1, 1, 2], (1, 1), 3, False),
        ([9, 1, 2, 1, 2], (1, 2), 2, True),
        ([1, 2, 3, 1, 2, 3], (0, 3), 2, True),
        ([1, 2, 3, 1, 2, 3], (0, 2), 2, False),
        ([1, 1], (1, 4), 3, False),
        ([1, 1, 1], (0, 0), 3, False),
        ([1, 1, 1], (1, 1), 1, False),
    ],
)
def test_repetition_detector(tokens: list[int], sizes: tuple[int, int], count: int, found: bool) -> None:
    # Parameters that switch the detector off are refused by the public constructor, so they are set afterwards.
    params = RepetitionDetectionParams(max_pattern_size=5, min_pattern_size=1, min_count=2)
    params.min_pattern_size, params.max_pattern_size = sizes
    params.min_count = count
    assert check_sequence_repetition(tokens, params) is found


def test_the_repetition_detector_is_quick_for_patterns_of_any_size() -> None:
    tokens = list(range(40_000))
    params = RepetitionDetectionParams(max_pattern_size=20_000, min_pattern_size=1, min_count=2)
    start = time.process_time()  # a loaded machine is not the detector's fault
    assert not check_sequence_repetition(tokens, params)
    assert time.process_time() - start < 0.2


def test_remove_all_keeps_the_rest_in_order() -> None:
    assert remove_all([1, 2, 3], set()) == [1, 2, 3]
    assert remove_all([1, 2, 3], {2}) == [1, 3]
    assert remove_all([1, 2, 3], {7}) == [1, 2, 3]
    assert remove_all([1, 2, 3, 4], {1, 4}) == [2, 3]
