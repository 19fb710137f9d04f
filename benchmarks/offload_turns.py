"""What offload costs one and the same engine: rounds with its connector attached and detached in turns.

Of two processes one has the luckier memory, for all its life and by more than offload costs. Here both sides are one process,
and a round has the same steps on both. Rounds are short and come in the order of `paired.ORDER`. What is left out is the front
end's share: metrics of the offload, a few per step. `offload_throughput.py` runs this in a process of its own; by itself it writes
its figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.paired import ORDER
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreRequest

WARM_UP_ROUNDS = 2
"""After those that fill the CPU pool."""
QUADS_MIN = 2


@dataclass(frozen=True)
class Round:
    """Seconds of each step until the last answer, and processor seconds with the copies that end after it."""

    steps: list[float]
    cpu_s: float


class Turns:
    """An engine core with eager offload whose connector can be taken off and put back while nothing runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.core = EngineCore(*_configuration(options), log_stats=True)
        self._chance = random.Random(23)
        self._serial = 0
        self._scheduler: Any = self.core.scheduler
        # A benchmark may reach into the engine: there is no setting that does this to a running one.
        self._runner: Any = self.core.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
        self.connector = self._scheduler.connector
        self._attached = (self.connector, self._scheduler.defer_block_free, self._runner.connector)

    def attach(self, attached: bool) -> None:
        """Detached, the engine is one without offload."""
        state = self._attached if attached else (None, False, None)
        self._scheduler.connector, self._scheduler.defer_block_free, self._runner.connector = state

    def run_round(self) -> Round:
        """Requests that come at once, until the last answer."""
        requests = [self._request() for _ in range(self.options.requests)]
        core, steps = self.core, []
        used, began = time.process_time(), time.perf_counter()
        for request in requests:
            core.add_request(*core.preprocess_add_request(request))
        while self._scheduler.has_unfinished_requests() or core.batch_queue:
            core.tick()
            core.step_fn()
            began, before = time.perf_counter(), began
            steps.append(began - before)
        while core.has_work():
            core.step_fn()
            time.sleep(0.001)
        return Round(steps, time.process_time() - used)

    def _request(self) -> EngineCoreRequest:
        self._serial += 1
        ids = [self._chance.randrange(3, self.options.vocabulary) for _ in range(self.options.prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=self.options.output, ignore_eos=True)
        return EngineCoreRequest(str(self._serial), ids, None, sampling, None, time.time(), None, None, None)

    def stored(self) -> tuple[int, int]:
        """(blocks, bytes) copied to the CPU pool so far."""
        (tier,) = self.connector.get_tier_reports()
        (store,) = [transfer for transfer in tier.transfers if transfer.direction == "store"]
        return store.blocks_done, store.bytes_done


def _configuration(options: argparse.Namespace) -> tuple[Any, Any]:
    """The configuration and the executor's class."""
    extra = {"cpu_bytes_to_use_per_rank": 1 << 40, "num_cpu_blocks": options.pool_blocks}
    transfer = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    config = EngineArgs(
        model=options.model,
        dtype="float32",
        max_model_len=options.max_model_len,
        num_gpu_blocks_override=options.pool_blocks,
        max_num_seqs=options.requests,
        kv_transfer_config=transfer | {"kv_connector_extra_config": extra},
    ).create_engine_config()
    return config, Executor.get_class(config)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds in order, and what one with offload stores."""
    turns = Turns(options)
    rounds: list[Round] = []
    with ExitStack() as stack, tqdm(total=options.quads, desc="in turns", unit="four rounds") as bar:
        stack.callback(turns.core.shutdown)
        for _ in range(options.filling_rounds + WARM_UP_ROUNDS):
            turns.run_round()
        before = turns.stored()
        end = time.monotonic() + options.seconds
        while bar.n < options.quads and (bar.n < QUADS_MIN or time.monotonic() < end):
            for side in ORDER:
                turns.attach(side == "eager")
                rounds.append(turns.run_round())
            bar.update()
        turns.attach(True)
        after = turns.stored()
    with_offload = len(rounds) * ORDER.count("eager") // len(ORDER)
    return {
        "steps_s": [entry.steps for entry in rounds],
        "cpu_s": [entry.cpu_s for entry in rounds],
        "blocks_per_round": (after[0] - before[0]) / with_offload,
        "bytes_per_round": (after[1] - before[1]) / with_offload,
    }


def main() -> int:
    """Command line: sizes in, JSON out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="file for the figures")
    parser.add_argument("--quads", type=int, default=1000, help="groups of four rounds, two of each side")
    parser.add_argument("--seconds", type=float, default=60.0, help="no group is begun after so long")
    parser.add_argument(
        "--filling-rounds", type=int, default=3, help="after which the CPU pool was written once"
    )
    parser.add_argument("--requests", type=int, default=8, help="of a round, all at once")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--output", type=int, default=8, help="tokens")
    parser.add_argument("--pool-blocks", type=int, default=132, help="of either pool")
    parser.add_argument("--vocabulary", type=int, default=40000, help="token ids are below it")
    parser.add_argument("--max-model-len", type=int, default=8192, help="tokens")
    options = parser.parse_args()
    options.out.write_text(json.dumps(measure(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
