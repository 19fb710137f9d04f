"""The flags of `vllm serve`: the server's own and the engine's. Layer: L8."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, Final

from vllm.engine.arg_table import add_flag, specs_of
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.common.frontend_args import PORT_MAX, PORT_MIN, BaseFrontendArgs, FrontendArgs
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.openai.reasoning import check_reasoning_parser
from vllm.entrypoints.openai.tool_parsers.base import get_tool_parser, load_tool_parser_plugin
from vllm.logger import init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser, json_value

logger = init_logger(__name__)

# Flag → why a value other than the default is refused.
REFUSED: Final = {
    "tool_server": "there is no built-in tool execution",
    "enable_scale_out": "one server runs one engine",
    "enable_offline_docs": "the docs page needs its usual files",
    "enable_ssl_refresh": "restart the server to change certificates",
    "lora_modules": "LoRA adapters are not part of this build",
    "headless": "engines are not spread over nodes by this build",
    "grpc": "there is no gRPC server",
}


class LoRAParserAction(argparse.Action):
    """Adapters as `name=path` or as JSON with name, path and base_model_name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if isinstance(values, str) or values is None:
            parser.error(f"{option_string} expects a list")
        setattr(namespace, self.dest, [_lora_module(parser, str(item)) for item in values])


def _lora_module(parser: argparse.ArgumentParser, text: str) -> LoRAModulePath:
    if not text.lstrip().startswith("{"):
        name, separator, path = text.partition("=")
        if not separator:
            parser.error(f"--lora-modules: {text!r} is neither name=path nor JSON")
        return LoRAModulePath(name, path)
    try:
        return LoRAModulePath(**json.loads(text))
    except (ValueError, TypeError) as error:
        parser.error(f"--lora-modules: {text!r}: {error}")


def port_number(text: str) -> int:
    """Type of `--port`."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number")
    port = int(text)
    if not PORT_MIN <= port <= PORT_MAX:
        raise argparse.ArgumentTypeError(f"port {port} must be between {PORT_MIN} and {PORT_MAX}")
    return port


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Declare every flag of `vllm serve` on `parser`."""
    parser.add_argument("model_tag", nargs="?", default=None, help="Model to serve.")
    parser.add_argument(
        "--config", default=None, metavar="FILE", help="YAML file with flags; given flags win."
    )
    group = parser.add_argument_group("Frontend")
    for spec in specs_of(FrontendArgs):
        if spec.name != "port":
            add_flag(group, spec)
    group.add_argument("--port", type=port_number, default=8000, metavar="PORT", help="Port, 1024 to 65535.")
    group.add_argument(
        "--lora-modules", nargs="*", action=LoRAParserAction, default=None, help="Not supported."
    )
    group.add_argument(
        "--middleware", action="append", default=[], metavar="PATH", help="ASGI middleware; repeatable."
    )
    for name, default in (("origins", []), ("methods", ["*"]), ("headers", ["*"])):
        group.add_argument(
            f"--allowed-{name}",
            type=json_value,
            default=default,
            metavar="JSON",
            help=f"CORS {name}, a JSON list.",
        )
    group.add_argument(
        "--headless",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Not supported: engines without an API server.",
    )
    group.add_argument("--grpc", action="store_true", help="Not supported.")
    group.add_argument(
        "--api-server-count", "-asc", type=int, default=None, metavar="N", help="Only 1 is supported."
    )
    group.add_argument("--log-level", default=None, metavar="LEVEL", help="Level of the log.")
    group.add_argument(
        "--log-config-file", default=None, metavar="FILE", help="JSON file for logging.config.dictConfig."
    )
    AsyncEngineArgs.add_cli_args(parser)
    return parser


UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Check flags against each other.

    Raises TypeError if a flag lacks another one that it needs, ValueError for values that cannot work.
    """
    if args.tool_parser_plugin:
        load_tool_parser_plugin(args.tool_parser_plugin)
    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise TypeError("--enable-auto-tool-choice needs --tool-call-parser")
    if args.tool_call_parser:
        get_tool_parser(args.tool_call_parser)
    if args.enable_log_outputs and not args.enable_log_requests:
        raise TypeError("--enable-log-outputs needs --enable-log-requests")
    check_reasoning_parser(args.reasoning_parser)
    load_chat_template(args.chat_template)
    if bool(args.ssl_keyfile) != bool(args.ssl_certfile):
        raise TypeError("--ssl-keyfile and --ssl-certfile need each other")
    if args.uvicorn_log_level not in UVICORN_LOG_LEVELS:
        raise ValueError(
            f"--uvicorn-log-level {args.uvicorn_log_level!r} is none of {', '.join(UVICORN_LOG_LEVELS)}"
        )
    for name in ("origins", "methods", "headers"):
        value = getattr(args, f"allowed_{name}")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"--allowed-{name} must be a JSON list of texts, got {value!r}")


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Raise ValueError for a server flag whose feature does not exist here."""
    for name, reason in REFUSED.items():
        value = vars(args).get(name)
        if value:
            raise ValueError(f"--{name.replace('_', '-')}={value!r} is not supported: {reason}")
    if args.api_server_count not in (None, 1):
        raise ValueError(
            f"--api-server-count={args.api_server_count} is not supported: an engine has one front end"
        )
    if args.trust_request_mm_kwargs:
        logger.warning_once("--trust-request-mm-kwargs has no effect: this engine serves text only")


def resolve_model(args: argparse.Namespace) -> None:
    """Put the model into `args.model`, from the positional argument or `--model`."""
    if args.model_tag is not None:
        args.model = args.model_tag
    elif args.model != AsyncEngineArgs.model:
        logger.warning("With `vllm serve`, give the model as the first argument instead of with --model")
    if args.tokens_only:
        args.skip_tokenizer_init = True


__all__ = [
    "BaseFrontendArgs",
    "FrontendArgs",
    "LoRAParserAction",
    "make_arg_parser",
    "refuse_unsupported",
    "resolve_model",
    "validate_parsed_serve_args",
]
