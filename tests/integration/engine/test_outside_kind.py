"""A KV kind and a model of an installed package outside the tree, from its entry points to the engine's answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.helpers.engine_configs import tiny_folder

ROOT = Path(__file__).parents[3]

SPECS = """
from dataclasses import dataclass
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpecKind
from vllm.v1.kv_cache_spec_base import max_model_len_of

@dataclass(frozen=True, kw_only=True)
class LastTokensSpec(AttentionSpec):
    reach: int

    @property
    def sharing_key(self):
        return (self.reach,)

    @property
    def kv_cache_spec_kind(self):
        return KVCacheSpecKind.SLIDING_WINDOW

    def max_admission_blocks_per_request(self, max_in_flight_tokens, max_model_len):
        return cdiv(min(self.reach - 1 + max_in_flight_tokens, max_model_len), self.block_size) + 1

    def max_memory_usage_bytes(self, vllm_config):
        most = self.max_admission_blocks_per_request(vllm_config.max_in_flight_tokens, max_model_len_of(vllm_config))
        return most * self.page_size_bytes
"""

KIND = """
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager

class LastTokensManager(SingleTypeKVCacheManager):
    @classmethod
    def admission_cap(cls, kv_cache_spec, max_in_flight_tokens, max_model_len):
        return kv_cache_spec.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block,
        alignment_tokens, dcp_world_size=1, pcp_world_size=1,
    ):
        size = kv_cache_spec.block_size
        run = cdiv(kv_cache_spec.reach - 1, size)
        for end in range(min(max_length // size, len(block_hashes)), 0, -1):
            start = max(0, end - run)
            found = [block_pool.get_cached_block(h, kv_cache_group_ids) for h in block_hashes[start:end]]
            if end * size % alignment_tokens == 0 and None not in found:
                head = [block_pool.null_block] * start
                return tuple([*head, *column] for column in zip(*found)), end * size
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_skipped_tokens(self, num_computed_tokens):
        return max(0, num_computed_tokens - self.kv_cache_spec.reach + 1)
"""

MODEL = """
from dataclasses import replace
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.kv_cache_interface import SlidingWindowSpec, replace_as
from outside.specs import LastTokensSpec

def outside(specs):
    return {
        name: replace_as(s, LastTokensSpec, drop=("sliding_window", "extra_retained_tokens"), reach=s.sliding_window)
        if isinstance(s, SlidingWindowSpec) else s
        for name, s in specs.items()
    }

class OutsideForCausalLM(LlamaForCausalLM):
    @classmethod
    def kv_specs_from_config(cls, hf_config, settings):
        return outside(super().kv_specs_from_config(hf_config, settings))

    def kv_specs(self):
        return outside(super().kv_specs())

def register():
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("OutsideForCausalLM", "outside.model:OutsideForCausalLM")
"""

ENTRY_POINTS = """
[vllm.general_plugins]
outside = outside.model:register
[vllm.kv_cache_kinds]
outside.specs.LastTokensSpec = outside.kind:LastTokensManager
"""

USE = """
import json, sys
from tests.helpers.engine_configs import engine_args, offload_settings, prompt_of
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

def answers(model, in_process):
    args = engine_args(model=model, max_num_batched_tokens=64, **offload_settings())
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=not in_process)
    told = []
    for name in "fresh", "again", "below":
        if name == "below":
            assert engine.reset_prefix_cache()
        for i in range(2):
            params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
            engine.add_request(f"{name}{i}", prompt_of(100 + 50 * i, i), params)
        done = {}
        while engine.has_unfinished_requests():
            done.update({out.request_id: out for out in engine.step() if out.finished})
        told += [[list(out.outputs[0].token_ids), out.num_cached_tokens] for _, out in sorted(done.items())]
    kinds = []
    if in_process:
        managers = engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers
        kinds = sorted(type(manager).__module__ for manager in managers)
    engine.shutdown()
    return told, kinds

if __name__ == "__main__":
    theirs, ours = sys.argv[1:]
    print(json.dumps([answers(theirs, True), answers(ours, True), answers(ours, False)]))
"""


def install(folder: Path) -> Path:
    """Build a wheel and let pip install it; returns the folder that is to be on the path."""
    info = "outside-1.0.dist-info"
    files = {
        "outside/__init__.py": "",
        "outside/specs.py": SPECS,
        "outside/kind.py": KIND,
        "outside/model.py": MODEL,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": ENTRY_POINTS,
        f"{info}/RECORD": "",
    }
    wheel = folder / "outside-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(site), str(wheel)], check=True, timeout=120)
    return site


def test_an_installed_package_serves_a_model_with_a_kind_of_its_own(tmp_path: Path) -> None:
    site, script = install(tmp_path), tmp_path / "use.py"
    script.write_text(USE)
    config = json.loads((tiny_folder("mistral") / "config.json").read_text())
    layers = ["full_attention", "sliding_attention"] * config["num_hidden_layers"]
    config |= {"layer_types": layers[: config["num_hidden_layers"]], "sliding_window": 40}
    for name, changes in (("theirs", {}), ("ours", {"architectures": ["OutsideForCausalLM"]})):
        shutil.copytree(tiny_folder("mistral"), tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, str(script), str(tmp_path / "theirs"), str(tmp_path / "ours")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (theirs, kinds), (ours, our_kinds), (in_a_process, _) = json.loads(done.stdout.splitlines()[-1])
    assert not any(kind.startswith("outside") for kind in kinds)
    assert our_kinds == ["outside.kind", "vllm.v1.core.kv_kinds.full"]
    assert ours == theirs
    assert in_a_process == theirs, "the core's process has loaded the package too"
    assert [cached for _, cached in ours] == [0, 0, 96, 144, 96, 144], "found on the device, and below it"
