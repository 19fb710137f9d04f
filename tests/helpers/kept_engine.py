"""An engine with a disk tier that is kept, as a process that a test may kill: one line of JSON per finished prompt.

python -m tests.helpers.kept_engine MODEL_FOLDER DISK_PATH NUM_PROMPTS
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.helpers.engine_configs import engine_args, offload_settings
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine


def settings(disk_path: str) -> dict[str, Any]:
    """Few host blocks, so that most prompts are on disk only."""
    fields = offload_settings()
    fields["kv_transfer_config"]["kv_connector_extra_config"] = {
        "num_cpu_blocks": 33,
        "disk_tier": True,
        "disk_persist": True,
        "disk_path": disk_path,
        "disk_capacity_bytes": 64 << 20,
    }
    return fields


def prompt_of(length: int, seed: int) -> list[int]:
    """Tokens that no other seed starts with."""
    return [3 + (7 * i + 31 * seed + i * i % 11) % 250 for i in range(length)]


def finish(engine: LLMEngine, name: str, prompt: list[int]) -> RequestOutput:
    """Run one request greedily to its end."""
    engine.add_request(name, prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    done: list[RequestOutput] = []
    while not done:
        done = [out for out in engine.step() if isinstance(out, RequestOutput) and out.finished]
    return done[0]


def main() -> None:
    model, disk_path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    arguments = engine_args(model=model, max_model_len=512, **settings(disk_path))
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
    engine.shutdown()


if __name__ == "__main__":
    main()
