"""`vllm serve`: flags in, a running server out. Layer: L8."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import cast

from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.common.startup import apply_logging_flags, log_non_default_args
from vllm.logger import init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.registry import resolve_object
from vllm.version import __version__

logger = init_logger(__name__)

# Loaded only to serve: it brings the engine with it.
RUN_SERVER = "vllm.entrypoints.openai.api_server:run_server"


def make_parser() -> FlexibleArgumentParser:
    """The parser of this command."""
    description = (
        "Start an OpenAI-compatible HTTP server.\n"
        "Search the flags with --help=GROUP, --help=KEYWORD, --help=FLAG, --help=listgroup or --help=all."
    )
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve", description=description))


def main(argv: list[str]) -> int:
    """Serve until told to stop; the exit status. Raises ValueError or TypeError for flags that cannot work."""
    args = make_parser().parse_args(argv)
    apply_logging_flags(args.log_level, args.log_config_file)
    logger.info("vLLM interface %s", __version__)
    log_non_default_args(args)
    run = cast(Callable[[argparse.Namespace], int], resolve_object(RUN_SERVER))
    return run(args)
