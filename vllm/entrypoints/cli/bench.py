"""`vllm bench {latency,throughput,serve}`: measurements with random prompts. Layer: L8."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.bench_load import LoadPlan, percentile, random_prompts, run_load, summary
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.registry import resolve_object

# Loaded only to measure in process: it brings the engine with it.
LLM_CLASS: Final = "vllm.entrypoints.llm:LLM"


def _make_llm(args: argparse.Namespace) -> Any:
    llm_class: Any = resolve_object(LLM_CLASS)
    return llm_class.from_engine_args(EngineArgs.from_cli_args(args))


def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)


def _report(figures: Mapping[str, float], output_json: str | None) -> None:
    for name, value in figures.items():
        print(f"{name:<24} {value:.3f}")
    if output_json is not None:
        Path(output_json).write_text(json.dumps(figures, indent=2) + "\n")


def _engine_parser(command: str) -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog=f"vllm bench {command}")
    parser.add_argument("--input-len", type=int, default=32, help="Tokens of each prompt.")
    parser.add_argument("--output-len", type=int, default=128, help="Tokens of each answer.")
    parser.add_argument("--output-json", default=None, metavar="FILE", help="Write the figures there too.")
    EngineArgs.add_cli_args(parser)
    return parser


def _check_at_least(args: argparse.Namespace, **smallest: int) -> None:
    """`ValueError` naming the flag whose value is smaller; one that was not given is fine."""
    for name, least in smallest.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def _check_shared(flag: str, shared: int, length: int) -> None:
    if not 0 <= shared <= length:
        raise ValueError(f"{flag} must be from 0 to the {length} tokens of a prompt, got {shared}")


def latency(argv: list[str]) -> int:
    """Time of one batch; the exit status."""
    parser = _engine_parser("latency")
    parser.add_argument("--batch-size", type=int, default=8, help="Prompts per batch.")
    parser.add_argument("--num-iters-warmup", type=int, default=2, help="Batches before the measurement.")
    parser.add_argument("--num-iters", type=int, default=5, help="Batches that are measured.")
    args = parser.parse_args(argv)
    _check_at_least(args, input_len=1, output_len=1, batch_size=1, num_iters_warmup=0, num_iters=1)
    with _make_llm(args) as llm:
        vocab = llm.model_config.get_vocab_size()
        times = []
        for number in range(args.num_iters_warmup + args.num_iters):
            # Other prompts every time: nothing may come from the prefix cache.
            prompts = random_prompts(args.batch_size, args.input_len, vocab, seed=args.seed + number)
            start = time.monotonic()
            llm.generate(prompts, _params(args.output_len), use_tqdm=False)
            if number >= args.num_iters_warmup:
                times.append(time.monotonic() - start)
    figures = {"mean_latency_s": statistics.fmean(times)}
    figures |= {f"p{int(share * 100)}_latency_s": percentile(times, share) for share in (0.1, 0.5, 0.9, 0.99)}
    _report(figures, args.output_json)
    return 0


def throughput(argv: list[str]) -> int:
    """Tokens per second with all prompts handed over at once; the exit status."""
    parser = _engine_parser("throughput")
    parser.add_argument("--num-prompts", type=int, default=100, help="Number of prompts.")
    parser.add_argument(
        "--prefix-len", type=int, default=0, help="Tokens that all prompts share at their start."
    )
    args = parser.parse_args(argv)
    _check_at_least(args, input_len=1, output_len=1, num_prompts=1)
    _check_shared("--prefix-len", args.prefix_len, args.input_len)
    with _make_llm(args) as llm:
        vocab = llm.model_config.get_vocab_size()
        prompts = random_prompts(args.num_prompts, args.input_len, vocab, args.seed, args.prefix_len)
        start = time.monotonic()
        outputs = llm.generate(prompts, _params(args.output_len), use_tqdm=False)
        seconds = time.monotonic() - start
    made = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    total = made + sum(len(prompt) for prompt in prompts)
    figures = {
        "duration_s": seconds,
        "requests_per_s": len(prompts) / seconds,
        "output_tokens_per_s": made / seconds,
        "total_tokens_per_s": total / seconds,
    }
    _report(figures, args.output_json)
    return 0


def serve(argv: list[str]) -> int:
    """Latencies of a running server under load; the exit status."""
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    parser.add_argument(
        "--base-url", default=None, help="Address of the server; host and port when not given."
    )
    parser.add_argument("--host", default="127.0.0.1", help="Host of the server.")
    parser.add_argument("--port", type=int, default=8000, help="Port of the server.")
    parser.add_argument("--model", default=None, help="Served name; the server's first when not given.")
    parser.add_argument("--api-key", default=None, help="Key of the server.")
    parser.add_argument("--num-prompts", type=int, default=100, help="Number of requests.")
    parser.add_argument("--random-input-len", type=int, default=128, help="Tokens of each prompt.")
    parser.add_argument("--random-output-len", type=int, default=64, help="Tokens of each answer.")
    parser.add_argument("--random-prefix-len", type=int, default=0, help="Tokens that all prompts share.")
    parser.add_argument("--vocab-size", type=int, default=256, help="Prompt token ids lie below this.")
    parser.add_argument(
        "--request-rate", type=float, default=float("inf"), help="Requests per second; inf: at once."
    )
    parser.add_argument("--max-concurrency", type=int, default=None, help="Most requests in flight.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of prompts and arrivals.")
    parser.add_argument("--output-json", default=None, metavar="FILE", help="Write the figures there too.")
    args = parser.parse_args(argv)
    _check_at_least(args, num_prompts=1, random_input_len=1, random_output_len=1, max_concurrency=1)
    # The ids below 3 are special tokens.
    _check_at_least(args, vocab_size=4)
    _check_shared("--random-prefix-len", args.random_prefix_len, args.random_input_len)
    if not args.request_rate > 0:
        raise ValueError(f"--request-rate must be greater than 0, got {args.request_rate}")
    figures = asyncio.run(_measure(args))
    _report(figures, args.output_json)
    return 1 if figures["failed"] else 0


async def _measure(args: argparse.Namespace) -> dict[str, float]:
    url = args.base_url or f"http://{args.host}:{args.port}"
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    plan = LoadPlan(
        prompts=random_prompts(
            args.num_prompts, args.random_input_len, args.vocab_size, args.seed, args.random_prefix_len
        ),
        output_tokens=args.random_output_len,
        rate=args.request_rate,
        concurrency=args.max_concurrency,
        seed=args.seed,
    )
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as client:
        model = args.model
        try:
            models = (await client.get("/v1/models")).raise_for_status().json()
        except httpx.HTTPError as error:
            raise ValueError(f"no server answers at {url}: {error}") from error
        results, seconds = await run_load(client, model or models["data"][0]["id"], plan)
    for message in sorted({result.error for result in results if result.error}):
        print(f"failed: {message}", file=sys.stderr)
    return summary(results, seconds)


COMMANDS: Final[Mapping[str, Callable[[list[str]], int]]] = {
    "latency": latency,
    "throughput": throughput,
    "serve": serve,
}
NOT_OFFERED: Final = ("startup", "sweep", "mm-processor")


def main(argv: list[str]) -> int:
    """Run one of the measurements; the exit status."""
    names = ", ".join(COMMANDS)
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: vllm bench {{{','.join(COMMANDS)}}} …")
        return 0 if argv else 2
    command = COMMANDS.get(argv[0])
    if command is None:
        reason = "is not offered by this build" if argv[0] in NOT_OFFERED else "is no measurement"
        raise ValueError(f"bench {argv[0]!r} {reason}; offered: {names}")
    return command(argv[1:])
