"""An engine whose disk is kept, as a process that a test may kill: one line of JSON per finished prompt.

python -m tests.helpers.kept_engine MODEL_FOLDER DISK_PATH NUM_PROMPTS [tier|backend] [reset]

With `reset` it then empties its caches, says what came of it, and is killed by itself before it can do anything else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from tests.helpers.engine_configs import engine_args, offload_settings, prompt_of
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine


def settings(disk_path: str, place: str = "tier") -> dict[str, Any]:
    """Few host blocks, so that most prompts are on disk only; or none, with the disk as a `backend` in their place."""
    fields = offload_settings()
    extra: dict[str, Any] = {
        "disk_persist": True,
        "disk_path": disk_path,
        "disk_capacity_bytes": 64 << 20,
        "decline_slow_tier": "off",  # computing is quick with so small a model
    }
    if place == "tier":
        extra |= {"num_cpu_blocks": 33, "disk_tier": True}
    else:
        extra |= {"kv_offload_backend": "disk", "use_page_cache": True}
    fields["kv_transfer_config"]["kv_connector_extra_config"] = extra
    return fields


def finish(engine: LLMEngine, name: str, prompt: list[int]) -> RequestOutput:
    """Run one request greedily to its end."""
    engine.add_request(name, prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    done: list[RequestOutput] = []
    while not done:
        done = [out for out in engine.step() if isinstance(out, RequestOutput) and out.finished]
    return done[0]


def main() -> None:
    model, disk_path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    arguments = engine_args(model=model, max_model_len=512, **settings(disk_path, *sys.argv[4:5]))
    engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    block = engine.cache_config.cache_hit_alignment_tokens
    assert block is not None
    for seed in range(count):
        output = finish(engine, f"r{seed}", prompt_of(3 * block + 5, seed))
        line = {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "block": block,
        }
        print(f"DONE {json.dumps(line)}", flush=True)
    if "reset" in sys.argv:
        on_disk = [
            pool["blocks_cached"] for pool in engine.get_kv_cache_report()["pools"] if pool["tier"] == "disk"
        ]
        print(f"HELD {on_disk[0]}", flush=True)
        print(f"RESET {engine.reset_prefix_cache(reset_connector=True)}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    engine.shutdown()


if __name__ == "__main__":
    main()
