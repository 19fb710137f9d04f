"""Logging set-up: every logger hangs below "vllm", which the first `init_logger` configures. Layer: L0.

Adds `info_once` and `warning_once` (one line per process and message) and nothing else to the standard loggers.
"""

from __future__ import annotations

import json
import logging
import logging.config
import sys
from pathlib import Path
from typing import TextIO, cast

from vllm import envs

ROOT_NAME = "vllm"
_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"
_printed: set[tuple[str, str, tuple[str, ...]]] = set()
_configured = False


class VLLMLogger(logging.Logger):
    """A standard logger that can also say a thing once."""

    def info_once(self, message: str, *args: object) -> None:
        """Log at INFO unless this logger has logged the same message with the same arguments before."""
        self._once(logging.INFO, message, args)

    def warning_once(self, message: str, *args: object) -> None:
        """Log at WARNING unless this logger has logged the same message with the same arguments before."""
        self._once(logging.WARNING, message, args)

    def _once(self, level: int, message: str, args: tuple[object, ...]) -> None:
        key = (self.name, message, tuple(repr(arg) for arg in args))
        if key in _printed:
            return
        _printed.add(key)
        self.log(level, message, *args, stacklevel=3)


def forget_printed() -> None:
    """Let `info_once` and `warning_once` say everything again, as in a new process."""
    _printed.clear()


class StandardStreamHandler(logging.Handler):
    """Writes to `sys.stdout` or `sys.stderr` as they are now, also after someone replaced them."""

    def __init__(self, stream_name: str) -> None:
        super().__init__()
        self._stream_name = stream_name

    def emit(self, record: logging.LogRecord) -> None:
        stream = cast(TextIO | None, getattr(sys, self._stream_name))
        if stream is None:
            return
        try:
            stream.write(self.format(record) + "\n")
            stream.flush()
        except (OSError, ValueError):
            self.handleError(record)


def _default_config() -> dict[str, object]:
    stream = envs.VLLM_LOGGING_STREAM.rpartition(".")[2]
    if stream not in ("stdout", "stderr"):
        raise ValueError(f"VLLM_LOGGING_STREAM={envs.VLLM_LOGGING_STREAM!r} must be stdout or stderr")
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {ROOT_NAME: {"format": envs.VLLM_LOGGING_PREFIX + _FORMAT, "datefmt": _DATE_FORMAT}},
        "handlers": {ROOT_NAME: {"()": StandardStreamHandler, "formatter": ROOT_NAME, "stream_name": stream}},
        "loggers": {
            ROOT_NAME: {"handlers": [ROOT_NAME], "level": envs.VLLM_LOGGING_LEVEL.upper(), "propagate": False}
        },
    }


def configure_logging() -> None:
    """Apply the logging settings of the environment; called by the first `init_logger`.

    Raises ValueError if VLLM_LOGGING_CONFIG_PATH does not name a readable JSON object.
    """
    if not envs.VLLM_CONFIGURE_LOGGING:
        return
    path = envs.VLLM_LOGGING_CONFIG_PATH
    config: object = _default_config()
    if path is not None:
        try:
            config = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"VLLM_LOGGING_CONFIG_PATH={path!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"VLLM_LOGGING_CONFIG_PATH={path!r} must hold a JSON object")
    logging.config.dictConfig(config)


def init_logger(name: str) -> VLLMLogger:
    """The logger for module `name`, configured."""
    global _configured
    if not _configured:
        _configured = True
        configure_logging()
    logger = logging.getLogger(name)
    if type(logger) is logging.Logger:
        logger.__class__ = VLLMLogger
    return cast(VLLMLogger, logger)
