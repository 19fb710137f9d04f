"""The CPU-offload round trip of a hybrid model with a scratch group, against a real server, as a table.

A prompt goes through the device's prefix cache and the CPU pool: fresh, device hit, CPU hit, extended CPU hit, miss after
a full reset. Every answer must equal the first one. Run: `make demo-offload`, or with a model folder as argument.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.kv_events import CacheIndex, rebuild, replay
from examples.serving import Completion, Server, event_flags, offload_flags, serve
from scripts.demo_model import resolve_model

MAX_MODEL_LEN = 1024
CPU_POOL_BYTES = 256 << 20
OUTPUT_TOKENS = 32
LOGPROB_TOLERANCE = 1e-4


@dataclass
class Row:
    """One line of the table: what was done, how many tokens should and did come from a cache, and whether it is right."""

    step: str
    expected_cached: str
    cached: int
    ok: bool
    note: str = ""


@dataclass
class LogprobRow:
    """Largest difference of the 20 best log-probabilities at the first position, against the fresh run."""

    prompt: str
    again: float
    device_hit: float
    cpu_hit: float
    same_top1: bool


def block_size(server: Server) -> int:
    """Tokens per scheduler block: hits are multiples of it. Read from the size of the hits themselves is circular, so ask."""
    info = server.request("GET", "/server_info?config_format=json").body
    return int(info["vllm_config"]["cache_config"]["cache_hit_alignment_tokens"])


def random_prompt(tokens: int, seed: int, vocabulary: int = 256) -> list[int]:
    """Token ids that no other seed shares a block with."""
    chance = random.Random(seed)
    return [chance.randrange(3, vocabulary) for _ in range(tokens)]


def full_blocks_below_last(tokens: int, block: int) -> int:
    """Tokens a hit can cover: the last token is always computed."""
    return (tokens - 1) // block * block


def roundtrip(server: Server) -> list[Row]:
    """The five steps of the round trip."""
    block = block_size(server)
    prompt = random_prompt(6 * block + block // 2 + 3, seed=1)
    hit = full_blocks_below_last(len(prompt), block)
    fresh = server.complete(prompt, OUTPUT_TOKENS)
    rows = [Row("fresh prompt", "0", fresh.cached_tokens, fresh.cached_tokens == 0)]

    def same(step: str, wanted: int, answer: Completion) -> Row:
        equal = answer.token_ids == fresh.token_ids
        ok = answer.cached_tokens == wanted and equal
        return Row(
            step, str(wanted), answer.cached_tokens, ok, "output identical" if equal else "OUTPUT DIFFERS"
        )

    rows.append(same("same prompt again: device hit", hit, server.complete(prompt, OUTPUT_TOKENS)))
    server.wait_for_stores()
    rows.append(_reset_row(server, external=False))
    rows.append(same("same prompt: CPU hit", hit, server.complete(prompt, OUTPUT_TOKENS)))

    server.wait_for_stores()
    rows.append(_reset_row(server, external=False))
    extended = prompt + random_prompt(block, seed=2)
    answer = server.complete(extended, OUTPUT_TOKENS)
    rows.append(
        Row(
            "extended prompt: CPU hit of the shared part",
            str(hit),
            answer.cached_tokens,
            answer.cached_tokens == hit,
        )
    )

    server.wait_for_stores()
    rows.append(_reset_row(server, external=True))
    rows.append(same("same prompt: miss", 0, server.complete(prompt, OUTPUT_TOKENS)))
    return rows


def _reset_row(server: Server, external: bool) -> Row:
    name = "reset device and CPU" if external else "reset device"
    done = server.reset(external)
    return Row(name, "-", 0, done, "success" if done else "REFUSED")


def logprob_rows(server: Server, prompts: list[str]) -> list[LogprobRow]:
    """Fresh, fresh again, device hit and CPU hit of natural-text prompts, compared by log-probabilities."""
    rows = []
    for prompt in prompts:
        server.wait_for_stores()
        server.reset(external=True)
        fresh = server.complete(prompt, 1, logprobs=20)
        server.wait_for_stores()
        server.reset(external=True)
        again = server.complete(prompt, 1, logprobs=20)
        device = server.complete(prompt, 1, logprobs=20)
        server.wait_for_stores()
        server.reset()
        cpu = server.complete(prompt, 1, logprobs=20)
        if not (fresh.cached_tokens == again.cached_tokens == 0 < device.cached_tokens == cpu.cached_tokens):
            raise RuntimeError(
                f"cached tokens {[c.cached_tokens for c in (fresh, again, device, cpu)]}: prompt too short?"
            )
        others = [again, device, cpu]
        top = [max(c.first_top_logprobs, key=c.first_top_logprobs.__getitem__) for c in [fresh, *others]]
        deltas = [_max_delta(fresh, other) for other in others]
        rows.append(LogprobRow(prompt[:32].replace("\n", " "), *deltas, same_top1=len(set(top)) == 1))
    return rows


def _max_delta(one: Completion, two: Completion) -> float:
    """Largest difference over tokens both lists report; the 20th place may swap between two equal values."""
    shared = one.first_top_logprobs.keys() & two.first_top_logprobs.keys()
    if len(shared) < len(one.first_top_logprobs) - 1:
        return float("inf")
    return max(abs(one.first_top_logprobs[token] - two.first_top_logprobs[token]) for token in shared)


def natural_prompts(count: int = 4, characters: int = 700) -> list[str]:
    """Pieces of this project's own documentation."""
    text = "\n".join(
        path.read_text() for path in sorted((Path(__file__).resolve().parents[1] / "docs").rglob("*.md"))
    )
    step = max(1, (len(text) - characters) // count)
    return [text[i * step : i * step + characters] for i in range(count)]


def check_events(index: CacheIndex, cacheable_groups: set[int]) -> list[str]:
    """What is wrong with a rebuilt index: groups that must not appear, broken sums, removals without a store."""
    problems = list(index.errors)
    for medium in ("GPU", "CPU"):
        if index.groups(medium) - cacheable_groups:
            problems.append(
                f"{medium}: events for groups {sorted(map(str, index.groups(medium)))}, cacheable {sorted(cacheable_groups)}"
            )
        if not index.groups(medium):
            problems.append(f"{medium}: no BlockStored at all")
    return problems


def print_tables(rows: list[Row], logprobs: list[LogprobRow]) -> None:
    """The two tables on standard output."""
    print(f"\n{'step':46s} {'expected':>9s} {'cached':>7s}  result")
    for row in rows:
        print(
            f"{row.step:46s} {row.expected_cached:>9s} {row.cached:7d}  {'ok' if row.ok else 'WRONG'}  {row.note}"
        )
    print(
        f"\nmax |delta logprob| of the 20 best, against the fresh run\n{'prompt':34s} {'again':>9s} {'device':>9s} {'cpu':>9s}  top-1"
    )
    for line in logprobs:
        top = "equal" if line.same_top1 else "DIFFERS"
        print(f"{line.prompt:34s} {line.again:9.1e} {line.device_hit:9.1e} {line.cpu_hit:9.1e}  {top}")


def good(rows: list[Row], logprobs: list[LogprobRow]) -> bool:
    """Whether every line of both tables is right."""
    fine = all(max(r.again, r.device_hit, r.cpu_hit) <= LOGPROB_TOLERANCE and r.same_top1 for r in logprobs)
    return fine and all(row.ok for row in rows)


def main() -> int:
    """Exit status 0 when every line is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="tiny:glm5_next", help="folder, or tiny:NAME")
    args = parser.parse_args()
    model = resolve_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        publish, again = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        flags = [
            *offload_flags(CPU_POOL_BYTES),
            *event_flags(publish, again),
            "--enforce-eager",
            "--dtype",
            "float32",
        ]
        command = ["vllm", "serve", str(model), *flags, "--max-model-len", str(MAX_MODEL_LEN)]
        print(f"starting: {shlex.join(command)}", flush=True)
        with serve(model, *flags, "--max-model-len", str(MAX_MODEL_LEN)) as server:
            print("ready; sending one prompt through both tiers", flush=True)
            rows = roundtrip(server)
            print("comparing the log-probabilities of four prompts", flush=True)
            logprobs = logprob_rows(server, natural_prompts())
            print("replaying the events", flush=True)
            index = rebuild(replay(again))
    print_tables(rows, logprobs)
    groups = {medium: sorted(map(str, index.groups(medium))) for medium in ("GPU", "CPU")}
    print(
        f"\nevents: {len(index.stored)} BlockStored, {index.removed} removed, {index.cleared} clears; groups seen {groups}"
    )
    print(f"problems in the event stream: {index.errors or 'none'}")
    return 0 if good(rows, logprobs) and not index.errors else 1


if __name__ == "__main__":
    sys.exit(main())
