"""Messages about one request: what they take with them, and when."""

from tests.helpers.sched import Driver, full, make_request, make_scheduler
from vllm.v1.core.sched.token_results import is_worth_sending, make_output
from vllm.v1.messages import EngineCoreEventType
from vllm.v1.outputs import ModelRunnerOutput


def test_events_stay_with_the_request_until_a_message_that_is_sent_takes_them() -> None:
    scheduler = make_scheduler([full(4)], 40)
    request = make_request(scheduler, "a", [1, 2, 3])
    runner = ModelRunnerOutput(["a"], {"a": 0}, [[]])
    request.record_event(EngineCoreEventType.QUEUED, 1.0)
    chunk = make_output(request, [], runner, 0)
    assert not is_worth_sending(chunk)
    assert chunk.events is None
    request.record_event(EngineCoreEventType.PREEMPTED, 2.0)
    first = make_output(request, [5], runner, 0)
    assert is_worth_sending(first)
    assert [event.type for event in first.events or ()] == [
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.PREEMPTED,
    ]
    assert make_output(request, [6], runner, 0).events is None, "an event is told once"


def test_a_prompt_in_chunks_tells_all_its_events_with_its_first_token() -> None:
    scheduler = make_scheduler([full(4)], 40, log_stats=True, max_num_batched_tokens=4)
    driver = Driver(scheduler, depth=1)
    driver.add("a", list(range(1, 11)), max_tokens=2)
    told = []
    for _ in range(3):
        output = driver.schedule()
        assert "a" in output.num_scheduled_tokens
        for message in driver.apply().values():
            told += [[event.type for event in entry.events or ()] for entry in message.outputs]
    assert told == [[EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]]
