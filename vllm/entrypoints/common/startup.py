"""What every command does first: process settings, and a log line of the flags that were given. Layer: L8."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from vllm import envs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.logger import ROOT_NAME, configure_logging, init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)

SECRET_FLAGS = ("api_key", "hf_token")


def cli_env_setup() -> None:
    """Settings of the process that only a command-line program may make."""
    # A forked child of a process with threads can hang; spawning is always safe.
    if not envs.is_set("VLLM_WORKER_MULTIPROC_METHOD"):
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def apply_logging_flags(log_level: str | None, log_config_file: str | None) -> None:
    """Apply `--log-level` and `--log-config-file`, here and in child processes. Raises ValueError for a bad value."""
    if log_config_file is not None:
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = log_config_file
        configure_logging()
    if log_level is not None:
        level = log_level.upper()
        if level not in logging.getLevelNamesMapping():
            raise ValueError(
                f"--log-level={log_level!r} is no level; known: {', '.join(logging.getLevelNamesMapping())}"
            )
        os.environ["VLLM_LOGGING_LEVEL"] = level
        logging.getLogger(ROOT_NAME).setLevel(level)


def get_non_default_args(args: argparse.Namespace) -> dict[str, Any]:
    """The flags whose value differs from the default; secrets are masked."""
    defaults = vars(make_arg_parser(FlexibleArgumentParser()).parse_args([]))
    given = {
        name: value for name, value in vars(args).items() if name in defaults and value != defaults[name]
    }
    return {name: "***" if name in SECRET_FLAGS else value for name, value in given.items()}


def log_non_default_args(args: argparse.Namespace) -> None:
    """Log the flags whose value differs from the default."""
    logger.info("non-default args: %s", get_non_default_args(args))
