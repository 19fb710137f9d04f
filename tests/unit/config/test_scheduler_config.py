import pytest
from pydantic import ValidationError

from vllm.config import SchedulerConfig


def make(**values):
    return SchedulerConfig(**{"max_model_len": 4096, "is_encoder_decoder": False, **values})


def test_defaults_and_required_values():
    config = make()
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.policy, config.watermark) == (
        2048,
        128,
        "fcfs",
        0.0,
    )
    assert config.max_num_encoder_input_tokens == config.encoder_cache_size == 2048
    assert SchedulerConfig.default_factory(max_num_seqs=3).max_num_seqs == 3
    assert (SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS, SchedulerConfig.DEFAULT_MAX_NUM_SEQS) == (
        2048,
        128,
    )
    with pytest.raises(ValidationError):
        SchedulerConfig()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"enable_chunked_prefill": False}, ["max_num_batched_tokens=2048", "max_model_len=4096"]),
        ({"max_num_batched_tokens": 64}, ["max_num_batched_tokens=64", "max_num_seqs=128"]),
        ({"max_num_active_seqs": 129}, ["max_num_active_seqs=129"]),
        ({"max_num_scheduled_tokens": 4096}, ["max_num_scheduled_tokens=4096"]),
        ({"long_prefill_token_threshold": 5000}, ["long_prefill_token_threshold=5000"]),
        ({"policy": "lifo"}, ["policy"]),
        ({"watermark": 1.0}, ["watermark"]),
        ({"stream_interval": 0}, ["stream_interval"]),
        ({"max_num_queued_reqs": 0}, ["max_num_queued_reqs"]),
        ({"prefill_schedule_interval": 0}, ["prefill_schedule_interval"]),
    ],
)
def test_limits_that_cannot_work_are_refused_naming_them(bad, words):
    with pytest.raises(ValidationError) as error:
        make(**bad)
    assert all(word in str(error.value) for word in words)


def test_encoder_decoder_models_are_not_chunked():
    config = make(is_encoder_decoder=True, max_model_len=1024)
    assert config.enable_chunked_prefill is False


def test_scheduler_class(monkeypatch):
    monkeypatch.setattr("vllm.config.scheduler.resolve_object", lambda target: target)
    assert make().get_scheduler_cls() == "vllm.v1.core.sched.scheduler:Scheduler"
    assert (
        make(async_scheduling=True).get_scheduler_cls() == "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
    )
    assert make(scheduler_cls="my.module.Scheduler").get_scheduler_cls() == "my.module.Scheduler"
    assert make(scheduler_cls=int).get_scheduler_cls() is int
