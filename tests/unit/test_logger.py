import json
import logging
import sys

import pytest

from vllm import logger as logging_setup
from vllm.logger import StandardStreamHandler, configure_logging, init_logger


@pytest.fixture
def restored():
    root = logging.getLogger("vllm")
    before = (list(root.handlers), root.level, root.propagate)
    yield root
    root.handlers, root.level, root.propagate = before


def test_messages_are_logged_once_per_logger_and_arguments(caplog):
    log = init_logger("vllm.test.once")
    for _ in range(3):
        log.info_once("hello %s", "a")
        log.warning_once("hello %s", "b")
    assert [record.getMessage() for record in caplog.records] == ["hello a", "hello b"]
    assert caplog.records[0].filename == "test_logger.py"


def test_root_logger_does_not_propagate_and_writes_to_the_current_stdout(restored, capsys):
    configure_logging()
    assert restored.propagate is False
    init_logger("vllm.test.stream").warning("seen")
    assert "seen" in capsys.readouterr().out


def test_level_and_prefix_come_from_the_environment(restored, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "error")
    monkeypatch.setenv("VLLM_LOGGING_PREFIX", "[me] ")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "stderr")
    configure_logging()
    init_logger("vllm.test.level").warning("no")
    init_logger("vllm.test.level").error("yes")
    err = capsys.readouterr().err
    assert "[me] ERROR" in err
    assert "no" not in err


def test_a_config_file_replaces_the_default(restored, monkeypatch, tmp_path):
    path = tmp_path / "log.json"
    path.write_text(
        json.dumps(
            {"version": 1, "disable_existing_loggers": False, "loggers": {"vllm": {"level": "CRITICAL"}}}
        )
    )
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(path))
    configure_logging()
    assert restored.level == logging.CRITICAL


@pytest.mark.parametrize("text", [None, "[1]", "{"])
def test_a_bad_config_file_is_refused(monkeypatch, tmp_path, text):
    path = tmp_path / "log.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(path))
    with pytest.raises(ValueError, match="VLLM_LOGGING_CONFIG_PATH"):
        configure_logging()


def test_bad_stream_is_refused_and_logging_can_be_left_alone(restored, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "printer")
    with pytest.raises(ValueError, match="printer"):
        configure_logging()
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    configure_logging()


def test_a_closed_stream_loses_the_line_not_the_program(monkeypatch):
    handler = StandardStreamHandler("stdout")
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "m", None, None)
    monkeypatch.setattr(sys, "stdout", None)
    handler.emit(record)

    class Closed:
        def write(self, text):
            raise ValueError("closed")

    seen = []
    monkeypatch.setattr(handler, "handleError", seen.append)
    monkeypatch.setattr(sys, "stdout", Closed())
    handler.emit(record)
    assert seen == [record]
    assert logging_setup.ROOT_NAME == "vllm"
