"""Many requests in a pool too small for them: preemption, shared prefixes, the CPU tier, clients that leave."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.offload_roundtrip import block_size, random_prompt
from examples.serving import Server, offload_flags, serve

REQUESTS = 8
OUTPUT_TOKENS = 224


@pytest.fixture(scope="module")
def small_server(tiny_glm: Path) -> Iterator[Server]:
    """A device pool that holds about three of the eight requests."""
    flags = [*offload_flags(64 << 20), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
    with serve(tiny_glm, *flags, "--num-gpu-blocks-override", "36") as server:
        yield server


def prompts(block: int) -> list[list[int]]:
    """Two families of four prompts; a family shares its first two blocks."""
    families = [random_prompt(2 * block, seed=family) for family in (1, 2)]
    return [families[n % 2] + random_prompt(block // 2 + n, seed=100 + n) for n in range(REQUESTS)]


def test_concurrent_requests_equal_their_solo_runs(small_server: Server) -> None:
    wanted = prompts(block_size(small_server))
    solo = [small_server.complete(prompt, OUTPUT_TOKENS).token_ids for prompt in wanted]
    for _ in range(2):
        small_server.wait_for_stores()
        small_server.reset(external=True)
        with ThreadPoolExecutor(REQUESTS) as pool:
            together = list(
                pool.map(lambda prompt: small_server.complete(prompt, OUTPUT_TOKENS).token_ids, wanted)
            )
        assert together == solo
    assert small_server.metric("vllm:num_preemptions_total") > 0


def test_a_client_that_leaves_mid_stream_frees_its_blocks(small_server: Server) -> None:
    prompt = random_prompt(100, seed=9)
    host, port = small_server.url.removeprefix("http://").split(":")
    for _ in range(5):
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        body = {"model": "m", "prompt": prompt, "max_tokens": 300, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        connection.close()
    deadline = time.monotonic() + 20
    while small_server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert small_server.metric("vllm:num_requests_running") == 0
    small_server.wait_for_stores()
    assert small_server.reset(external=True), "blocks are still held"
    assert small_server.complete(prompt, 4).cached_tokens == 0
