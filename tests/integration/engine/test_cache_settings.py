"""Settings of the KV cache as users give them, in an engine with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.engine_configs import engine_args, offload_settings, prompt_of, tiny_folder
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

engines: list[LLMEngine] = []


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    yield
    while engines:
        engines.pop().shutdown()


def start(args: EngineArgs) -> LLMEngine:
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
    engines.append(engine)
    return engine


def run(engine: LLMEngine, name: str, prompt: list[int], max_tokens: int = 8) -> RequestOutput:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(name, prompt, params)
    for _ in range(2000):
        for output in engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput)
                return output
    raise AssertionError("the engine makes no progress")


@pytest.mark.parametrize("length", [67, 97, 128, 147])
def test_hits_end_inside_a_page_on_the_device_and_below_it(length: int) -> None:
    """Pages of 64 tokens, found every 16: what is loaded from the host ends where what is on the device would."""
    engine = start(engine_args("glm5_next", prefix_match_unit=16, **offload_settings()))
    cache = engine.cache_config
    assert (cache.block_size, cache.hash_block_size, cache.cache_hit_alignment_tokens) == (64, 16, 16)
    prompt = prompt_of(length)
    fresh, again = run(engine, "a", prompt), run(engine, "b", prompt)
    assert engine.reset_prefix_cache()
    from_host = run(engine, "c", prompt)
    assert engine.reset_prefix_cache(reset_connector=True)
    cold = run(engine, "d", prompt)
    kept = (length - 1) // 16 * 16
    assert [o.num_cached_tokens for o in (fresh, again, from_host, cold)] == [0, kept, kept, 0]
    answers = {tuple(o.outputs[0].token_ids) for o in (fresh, again, from_host, cold)}
    assert len(answers) == 1


def served(name: str, *flags: str) -> EngineArgs:
    """What `vllm serve` makes of these flags."""
    model = [
        "--model",
        str(tiny_folder(name)),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-num-seqs",
        "4",
    ]
    parser = make_arg_parser(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args([*model, *flags]))


@pytest.mark.parametrize(("name", "memory"), [("llama", "200k"), ("gemma4", "1M"), ("glm5_next", "200k")])
def test_max_model_len_auto_serves_the_longest_request_that_fits(name: str, memory: str) -> None:
    flags = ("--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", memory)
    engine = start(served(name, "--max-model-len", "auto", *flags))
    longest = engine.model_config.max_model_len
    assert 64 < longest < 4096, "the model allows 4096"
    with pytest.raises(VLLMValidationError, match=str(longest)):
        engine.add_request("too long", prompt_of(longest + 1), SamplingParams(max_tokens=1))
    output = run(engine, "longest", prompt_of(longest - 4), 4)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match=f"estimated maximum model length is {longest}"):
        start(served(name, "--max-model-len", str(longest + 1), *flags))


def test_a_distance_of_states_that_the_model_does_not_offer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = start(engine_args("glm5_next", mamba_block_size=32))
    assert "mamba_block_size=32 has no effect: states are kept every 64 tokens" in caplog.text
    assert engine.cache_config.mamba_block_size == 64
    caplog.clear()
    assert start(engine_args("glm5_next")).cache_config.mamba_block_size == 64
    assert "no effect" not in caplog.text
