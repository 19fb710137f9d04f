"""`vllm run-batch`: answers a file of OpenAI batch requests with an engine of its own. Layer: L8."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.openai.api_server import build_state, prepare
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.errors import ErrorResponse, create_error_response
from vllm.entrypoints.openai.state import ServingState
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.logger import init_logger
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.ids import random_uuid
from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

Handler = Callable[[dict[str, Any]], Coroutine[Any, Any, Any]]
URL_TIMEOUT_S = 60.0


class BatchLine(BaseModel):
    """One request of the file."""

    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]


def read_text(place: str) -> str:
    """A file's or a URL's content. Raises ValueError if it cannot be read."""
    try:
        if place.startswith(("http://", "https://")):
            return httpx.get(place, timeout=URL_TIMEOUT_S).raise_for_status().text
        return Path(place).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(f"--input-file {place!r} cannot be read: {error}") from error


def write_text(place: str, text: str) -> None:
    """Write a file, or upload to a URL. Raises ValueError if that fails."""
    try:
        if place.startswith(("http://", "https://")):
            httpx.put(place, content=text, timeout=URL_TIMEOUT_S).raise_for_status()
        else:
            Path(place).write_text(text, encoding="utf-8")
    except (OSError, httpx.HTTPError) as error:
        raise ValueError(f"--output-file {place!r} cannot be written: {error}") from error


def parse_lines(text: str) -> list[BatchLine]:
    """The requests. Raises ValueError naming the line at fault."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            lines.append(BatchLine.model_validate_json(line))
        except ValidationError as error:
            raise ValueError(f"line {number} of the input is no batch request: {error}") from error
    return lines


def handlers(state: ServingState) -> dict[str, Handler]:
    """What answers each URL."""
    return {
        "/v1/completions": lambda body: state.completion.create_completion(CompletionRequest(**body)),
        "/v1/chat/completions": lambda body: state.chat.create_chat_completion(ChatCompletionRequest(**body)),
    }


async def answer(line: BatchLine, by_url: dict[str, Handler]) -> dict[str, Any]:
    """The output line for one request; a bad request is answered with its error."""
    try:
        handler = by_url.get(line.url)
        if handler is None:
            raise VLLMValidationError(
                f"url {line.url!r} is not offered; offered: {', '.join(by_url)}", parameter="url"
            )
        if line.body.get("stream"):
            raise VLLMValidationError("a batch request cannot be streamed", parameter="stream")
        result = await handler(line.body)
    except (VLLMError, ValidationError) as error:
        result = create_error_response(error)
    except Exception as error:  # a defect that one request shows must not cost the answers to all others
        logger.error("Request %r of the batch failed", line.custom_id)
        result = create_error_response(error)
    failed = isinstance(result, ErrorResponse)
    response = {
        "status_code": result.error.code if isinstance(result, ErrorResponse) else 200,
        "request_id": f"vllm-batch-{random_uuid()}",
        "body": None if failed else result.model_dump(),
    }
    error_body = result.error.model_dump() if isinstance(result, ErrorResponse) else None
    return {
        "id": f"vllm-{random_uuid()}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error_body,
    }


async def answer_all(lines: list[BatchLine], state: ServingState) -> list[dict[str, Any]]:
    """The output lines, in the order of the input."""
    by_url = handlers(state)
    return await asyncio.gather(*(answer(line, by_url) for line in lines))


def make_parser() -> FlexibleArgumentParser:
    """The parser of this command: the flags of `vllm serve` and two files."""
    parser = FlexibleArgumentParser(prog="vllm run-batch")
    parser.add_argument(
        "-i", "--input-file", required=True, help="File or URL with one JSON request per line."
    )
    parser.add_argument(
        "-o", "--output-file", required=True, help="File or URL for one JSON answer per line."
    )
    return make_arg_parser(parser)


def main(argv: list[str]) -> int:
    """Answer the file; the exit status. Raises ValueError or TypeError for flags that cannot work."""
    args: argparse.Namespace = make_parser().parse_args(argv)
    lines = parse_lines(read_text(args.input_file))
    prepare(args)
    vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_BATCH_RUNNER)
    engine = AsyncLLM.from_vllm_config(vllm_config, usage_context=UsageContext.OPENAI_BATCH_RUNNER)
    try:
        answers = asyncio.run(answer_all(lines, build_state(args, engine)))
    finally:
        engine.shutdown()
    write_text(args.output_file, "".join(json.dumps(entry) + "\n" for entry in answers))
    failures = sum(entry["error"] is not None for entry in answers)
    logger.info("Answered %d requests, %d of them with an error", len(answers), failures)
    return 0
