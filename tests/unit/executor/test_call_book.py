"""When a call to several ranks is over, and when the ranks have parted: rules without processes."""

from __future__ import annotations

import pytest

from vllm.v1.executor import call_book
from vllm.v1.executor.call_book import CallBook, WorkersFailedError
from vllm.v1.executor.worker_channel import Reply


@pytest.fixture
def book() -> CallBook:
    return CallBook(2, step_timeout_s=100.0)


def test_calls_end_in_their_order_with_all_answers(book) -> None:
    first, second = book.open("execute_model", 0.0), book.open("sample_tokens", 0.0)
    assert book.oldest() == "execute_model"
    assert book.note(0, Reply(1, 0, value="b"), 1.0) is None
    assert book.note(1, Reply(1, 0, value="d"), 1.0) is None
    assert not first.future.done()
    assert book.note(0, Reply(0, 0, value="a"), 1.0) is None
    assert first.future.result(0) == ["a", "b"]
    assert not second.future.done()
    book.note(1, Reply(0, 0, value="c"), 1.0)
    assert second.future.result(0) == ["c", "d"]
    assert book.oldest() is None


def test_an_error_of_all_ranks_at_one_point_ends_its_call_alone(book) -> None:
    call = book.open("execute_model", 0.0)
    assert book.note(0, Reply(1, 7, error=KeyError("one")), 0.0) is None
    assert book.note(0, Reply(0, 7, error=ValueError("zero")), 0.0) is None
    assert repr(call.future.exception(0)) == "ValueError('zero')"


def test_errors_at_different_points_part_the_ranks(book) -> None:
    call = book.open("check_sleep", 0.0)
    book.note(0, Reply(1, 7, error=KeyError("one")), 0.0)
    error = book.note(0, Reply(0, 8, error=ValueError("zero")), 0.0)
    assert isinstance(error, WorkersFailedError)
    assert "check_sleep failed on all ranks, not alike: rank 0: zero; rank 1: KeyError: 'one'" in str(error)
    assert call.future.exception(0) is error


def test_success_at_different_points_parts_the_ranks(book) -> None:
    call = book.open("execute_model", 0.0)
    book.note(0, Reply(1, 7), 0.0)
    error = book.note(0, Reply(0, 8), 0.0)
    assert "execute_model: the ranks are out of step with each other" in str(error)
    assert call.future.exception(0) is error


@pytest.mark.parametrize(("method", "is_fatal"), [("sample_tokens", True), ("sleep", True), ("own", False)])
def test_an_outcome_of_some_ranks_is_fatal_where_it_changes_what_they_hold(book, method, is_fatal) -> None:
    call = book.open(method, 0.0)
    book.note(0, Reply(0, 7), 0.0)
    error = book.note(0, Reply(1, 7, error=KeyError("one")), 0.0)
    assert (error is not None) == is_fatal
    assert str(call.future.exception(0)) == f"{method} failed on 1 of 2 ranks: rank 1: KeyError: 'one'"


def test_an_error_that_others_do_not_share_in_time_is_fatal_sooner_before_the_first_step(book) -> None:
    book.open("load_model", 0.0)
    book.note(0, Reply(1, 0, error=KeyError("one")), 50.0)
    assert book.overdue(50.0 + call_book.AGREE_AT_START_WITHIN_S - 0.1) is None
    assert "load_model failed on 1 of 2 ranks" in str(book.overdue(50.0 + call_book.AGREE_AT_START_WITHIN_S))

    later = CallBook(2, 100.0)
    later.open("execute_model", 0.0)
    later.note(0, Reply(1, 0, error=KeyError("one")), 50.0)
    assert later.overdue(50.0 + call_book.AGREE_WITHIN_S - 0.1) is None
    assert "execute_model failed on 1 of 2 ranks" in str(later.overdue(50.0 + call_book.AGREE_WITHIN_S))


def test_a_call_from_outside_may_take_other_ranks_longer(book) -> None:
    book.open("execute_model", 0.0)
    for rank in (0, 1):
        book.note(0, Reply(rank, 0), 0.0)
    call = book.open("own", 0.0)
    book.note(1, Reply(0, 0, error=KeyError("zero")), 1.0)
    assert book.overdue(100.9) is None
    assert "own failed on 1 of 2 ranks" in str(book.overdue(101.0))
    assert book.note(1, Reply(1, 0), 60.0) is None
    assert "rank 0: KeyError: 'zero'" in str(call.future.exception(0))


def test_who_waits_for_a_call_cannot_take_it_back(book) -> None:
    call = book.open("own", 0.0)
    assert not call.future.cancel()
    for rank in (0, 1):
        assert book.note(0, Reply(rank, 0, value=rank), 0.0) is None
    assert call.future.result(0) == [0, 1]


def test_a_steps_time_begins_when_it_is_the_oldest_and_other_calls_have_none(book) -> None:
    book.open("load_model", 0.0)
    book.open("execute_model", 0.0)
    assert book.overdue(1e9) is None
    for rank in (0, 1):
        book.note(0, Reply(rank, 0), 500.0)
    book.note(1, Reply(1, 0), 501.0)
    assert book.overdue(599.9) is None
    said = "execute_model was not done after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=100 s; no answer from rank 0"
    assert str(book.overdue(600.0)) == said


def test_all_open_calls_can_be_ended_once(book) -> None:
    calls = [book.open("execute_model", 0.0), book.open("sample_tokens", 0.0)]
    error = RuntimeError("gone")
    book.fail_all(error)
    book.fail_all(RuntimeError("again"))
    assert [call.future.exception(0) for call in calls] == [error, error]


def test_an_answer_to_no_call_is_a_defect(book) -> None:
    assert "answered a call that nobody made: 5" in str(book.note(5, Reply(0, 0), 0.0))
