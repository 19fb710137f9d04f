"""Facade: the flags of `vllm serve`, from where they were found before. Layer: L8."""

from vllm.entrypoints.common.cli_args import (
    BaseFrontendArgs,
    FrontendArgs,
    LoRAParserAction,
    make_arg_parser,
    validate_parsed_serve_args,
)

__all__ = [
    "BaseFrontendArgs",
    "FrontendArgs",
    "LoRAParserAction",
    "make_arg_parser",
    "validate_parsed_serve_args",
]
