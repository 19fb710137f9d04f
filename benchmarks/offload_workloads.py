"""What the offload benchmark asks of its servers: prompts by length on every tier, conversations.

Whatever is compared takes turns on servers that run side by side, or on one server; only one of them works at a time.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.offload_engines import Engine, Model, Reply, engine, random_ids
from examples.kv_events import rebuild, replay
from examples.serving import event_flags, offload_flags

# A hit that covers less than this share of the prompt says nothing about the tier.
HIT_SHARE_MIN = 0.7
# The engine would leave a disk alone that is slower than computing; here its speed is the question.
ALWAYS_READ = {"decline_slow_tier": "off"}


@dataclass(frozen=True)
class Scale:
    """Sizes of the workloads."""

    lengths: dict[str, tuple[int, ...]]
    step_tokens: int
    ttft_rounds: int
    conversations: int
    turns: int
    turn_tokens: int
    answer_tokens: int


# --- time to first token by length ------------------------------------------------------------------------------


def ttft_by_length(model: Model, lengths: tuple[int, ...], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """One row per length: medians of computing the prompt, of a device hit, a CPU hit and a disk hit.

    Every life of the server but the first asks for the prompts of the life before, which only its disk has kept; then it
    computes new ones and finds them in the device's pool and, after a reset of that, in the CPU pool. All lengths of a
    life are asked in another order.
    """
    chance = random.Random(11)
    times: dict[tuple[int, str], list[float]] = {}
    cached: dict[tuple[int, str], list[int]] = {}

    def note(tokens: int, what: str, reply: Reply) -> None:
        if what == "cold" and reply.cached_tokens:
            raise RuntimeError(f"a prompt that was never sent hit {reply.cached_tokens} tokens")
        cached.setdefault((tokens, what), []).append(reply.cached_tokens)
        if what == "cold" or reply.cached_tokens >= HIT_SHARE_MIN * tokens:
            times.setdefault((tokens, what), []).append(reply.ttft_s)

    extra = {"disk_tier": True, "disk_path": str(folder / "kv"), "disk_persist": True, **ALWAYS_READ}
    flags = offload_flags(2 << 30, disk_capacity_bytes=4 << 30, **extra)
    before: dict[int, list[int]] = {}
    with tqdm(total=(rounds * 4) * len(lengths), desc=f"TTFT, {model.name}", unit="prompt") as bar:
        for number in range(rounds + 1):
            with engine(model, *flags) as server:
                server.ask(random_ids(chance, model, 64), 4)
                for tokens, prompt in before.items():
                    note(tokens, "disk", server.ask(prompt))
                    bar.update()
                before = {}
                for tokens in chance.sample(lengths, len(lengths)) if number < rounds else ():
                    prompt = before[tokens] = random_ids(chance, model, tokens)
                    note(tokens, "cold", server.ask(prompt))
                    note(tokens, "device", server.ask(prompt))
                    server.settle()
                    server.drop()
                    note(tokens, "CPU", server.ask(prompt))
                    bar.update(3)
                server.settle()
    return [_ttft_row(model, tokens, times, cached) for tokens in lengths]


def _ttft_row(
    model: Model,
    tokens: int,
    times: dict[tuple[int, str], list[float]],
    cached: dict[tuple[int, str], list[int]],
) -> dict[str, Any]:
    kinds = ("cold", "device", "CPU", "disk")
    medians = {kind: statistics.median(times[tokens, kind]) for kind in kinds if (tokens, kind) in times}
    return {
        "model": model.name,
        "tokens": tokens,
        "ttft_s": medians,
        "faster_than_cold": {kind: medians["cold"] / value for kind, value in medians.items()},
        "cached_tokens": {kind: cached[tokens, kind] for kind in kinds if (tokens, kind) in cached},
        "ttft_all_s": {kind: times[tokens, kind] for kind in kinds if (tokens, kind) in times},
    }


# --- servers side by side ---------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Servers of one model with the same device pool and different offload."""

    engines: dict[str, Engine]
    replay: str
    device_blocks: int
    host_blocks: dict[str, int]


def working_set_blocks(model: Model, scale: Scale) -> int:
    """Device blocks that all conversations fill at their ends, from one conversation on a large pool."""
    chance = random.Random(5)
    length = scale.turns * (scale.turn_tokens + scale.answer_tokens)
    with engine(model, "--num-gpu-blocks-override", "4096") as server:
        server.ask(random_ids(chance, model, length))
        return int(server.pool("device")["blocks_cached"]) * scale.conversations


@contextmanager
def fleet(model: Model, working_set: int, step_tokens: int) -> Iterator[Fleet]:
    """off, eager and lazy with a CPU pool for everything, and disk: a CPU pool as small as the device's, and a disk."""
    device = max(working_set // 4, 24)
    host = {"eager": working_set * 5 // 4, "lazy": working_set * 5 // 4, "disk": device}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        again = f"ipc://{folder}/replay"
        disk = {"disk_tier": True, "disk_path": f"{folder}/kv", "disk_capacity_bytes": 4 << 30, **ALWAYS_READ}
        flags = {
            "off": [],
            "eager": offload_flags(1 << 40, num_cpu_blocks=host["eager"]),
            # All servers compute the same blocks; this one's events tell how many there are.
            "lazy": [
                *offload_flags(1 << 40, num_cpu_blocks=host["lazy"], lazy_offload=True),
                *event_flags(f"ipc://{folder}/events", again),
            ],
            "disk": offload_flags(1 << 40, num_cpu_blocks=host["disk"], **disk),
        }
        size = ["--num-gpu-blocks-override", str(device), "--max-num-seqs", "16"]
        # Lazy offload keeps ready what two steps may take; larger steps would make that the whole pool.
        size += ["--max-num-batched-tokens", str(step_tokens)]

        def start(own: list[str]) -> Engine:
            return stack.enter_context(engine(model, *size, *own))

        with ThreadPoolExecutor(len(flags)) as starters:
            waiting = {name: starters.submit(start, own) for name, own in flags.items()}
            shown = tqdm(waiting.items(), desc=f"servers, {model.name}", unit="server")
            engines = {name: future.result() for name, future in shown}
        yield Fleet(engines, again, device, host)


# --- conversations ----------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """One turn of a conversation on one server."""

    conversation: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    by_source: dict[str, int]
    ttft_s: float


@dataclass
class Talk:
    """The turns of one server."""

    turns: list[Turn] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Sums, and times of the turns that had something to reuse."""
        later = [turn for turn in self.turns if turn.turn > 0]
        prompt, cached = sum(t.prompt_tokens for t in self.turns), sum(t.cached_tokens for t in self.turns)
        sources: dict[str, int] = {}
        for turn in self.turns:
            for name, count in turn.by_source.items():
                sources[name] = sources.get(name, 0) + count
        return {
            "requests": len(self.turns),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "cached_tokens_by_source": sources,
            "hit_rate": cached / prompt,
            "ttft_later_turns_median_s": statistics.median(t.ttft_s for t in later),
            "ttft_later_turns_mean_s": statistics.mean(t.ttft_s for t in later),
            "ttft_first_turns_median_s": statistics.median(t.ttft_s for t in self.turns if t.turn == 0),
            "ttft_sum_s": sum(t.ttft_s for t in self.turns),
        }


def talks(ships: Fleet, model: Model, scale: Scale, conversations: int) -> dict[str, Any]:
    """Conversations in a random mix, every turn on every server in changing order; what was found, stored and how fast.

    All servers are asked the same: the answer that goes into the next prompt is the first server's.
    """
    chance = random.Random(31)
    for server in ships.engines.values():
        server.settle()
        server.drop(external=True)
    order = [talk for talk in range(conversations) for _ in range(scale.turns)]
    chance.shuffle(order)
    start = {name: server.moved("host", "store") for name, server in ships.engines.items()}
    since = len(replay(ships.replay))
    talking = {name: Talk() for name in ships.engines}
    histories: dict[int, list[int]] = {}
    turns: dict[int, int] = {}
    reusable = 0
    names = list(ships.engines)
    for step, conversation in enumerate(tqdm(order, desc=f"conversations, {model.name}", unit="turn")):
        history = histories.get(conversation, [])
        reusable += len(history)
        prompt = history + random_ids(chance, model, scale.turn_tokens)
        answers = {}
        for shift in range(len(names)):
            name = names[(step + shift) % len(names)]
            answers[name] = reply = ships.engines[name].ask(prompt, scale.answer_tokens)
            row = Turn(
                conversation,
                turns.get(conversation, 0),
                reply.prompt_tokens,
                reply.cached_tokens,
                reply.by_source,
                reply.ttft_s,
            )
            talking[name].turns.append(row)
        histories[conversation] = prompt + answers[names[0]].token_ids
        turns[conversation] = turns.get(conversation, 0) + 1
    result = {
        "model": model.name,
        "conversations": conversations,
        "device_blocks": ships.device_blocks,
        "reusable_tokens": reusable,
        "variants": {name: talk.report() for name, talk in talking.items()},
    }
    return result | {"writes": _writes(ships, start, since), "turns": _turn_times(talking)}


def _writes(ships: Fleet, start: dict[str, int], since: int) -> dict[str, Any]:
    """Bytes that went to the CPU pool beside the bytes of the distinct cacheable blocks that were computed."""
    for server in ships.engines.values():
        server.settle()
    index = rebuild(replay(ships.replay)[since:])
    block_bytes = ships.engines["off"].pool("device")["block_bytes"]
    distinct = {
        (event.get("group_idx"), key)
        for event in index.stored
        if event["medium"] == "GPU"
        for key in event["block_hashes"]
    }
    unique = len(distinct) * block_bytes
    stored = {
        name: server.moved("host", "store") - start[name]
        for name, server in ships.engines.items()
        if name != "off"
    }
    return {
        "unique_blocks": len(distinct),
        "block_bytes": block_bytes,
        "unique_bytes": unique,
        "stored_bytes": stored,
        "amplification": {name: count / unique for name, count in stored.items()},
    }


def _turn_times(talking: dict[str, Talk]) -> dict[str, list[float]]:
    """Median time to first token by turn number, for the plot."""
    times = {}
    for name, talk in talking.items():
        numbers = sorted({turn.turn for turn in talk.turns})
        times[name] = [
            statistics.median(turn.ttft_s for turn in talk.turns if turn.turn == number) for number in numbers
        ]
    return times
