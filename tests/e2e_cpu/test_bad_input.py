"""Bad flags end the start with a clear message; bad requests get a 4xx with an error object; the server goes on."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.serving import Server, free_port, serve


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Server]:
    with serve(
        tiny_llama, "--dtype", "float32", "--max-model-len", "128", "--num-gpu-blocks-override", "64"
    ) as running:
        yield running


def transfer(**fields: Any) -> list[str]:
    return ["--kv-transfer-config", json.dumps(fields)]


SIMPLE = "SimpleCPUOffloadConnector"
BAD_STARTS = {
    "unknown flag": (["--no-such-flag"], "no-such-flag"),
    "unknown config key": (transfer(kv_connector=SIMPLE, kv_role="kv_both", kv_rolle="x"), "kv_rolle"),
    "wrong type": (["--max-num-seqs", "many"], "max-num-seqs"),
    "missing role": (transfer(kv_connector=SIMPLE), "kv_role"),
    "unknown connector": (transfer(kv_connector="NoSuchConnector", kv_role="kv_both"), "NoSuchConnector"),
    "zero capacity": (
        transfer(kv_connector=SIMPLE, kv_role="kv_both", kv_connector_extra_config={"cpu_bytes_to_use": 0}),
        "cpu_bytes_to_use",
    ),
    "misspelt extra key": (
        transfer(
            kv_connector=SIMPLE, kv_role="kv_both", kv_connector_extra_config={"cpu_byte_to_use": 1 << 20}
        ),
        "cpu_bytes_to_use",
    ),
}


def failed_start(model: Path | str, flags: list[str]) -> str:
    """Output of a start that must fail."""
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--port",
        str(free_port()),
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize("case", BAD_STARTS)
def test_bad_flags_end_the_start_with_a_clear_message(tiny_llama: Path, case: str) -> None:
    flags, word = BAD_STARTS[case]
    assert word in failed_start(tiny_llama, flags)


def test_missing_checkpoint_folder(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in failed_start(tmp_path / "nowhere", [])


def test_torn_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    for path in tiny_llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = next(tmp_path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    assert weights.name in failed_start(tmp_path, [])


def test_unsupported_architecture(tiny_llama: Path, tmp_path: Path) -> None:
    for path in tiny_llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["NoSuchForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "NoSuchForCausalLM" in failed_start(tmp_path, [])


def test_connector_with_prefix_caching_off_warns_and_serves(tiny_llama: Path) -> None:
    flags = transfer(
        kv_connector=SIMPLE, kv_role="kv_both", kv_connector_extra_config={"cpu_bytes_to_use": 1 << 26}
    )
    with serve(
        tiny_llama, *flags, "--no-enable-prefix-caching", "--num-gpu-blocks-override", "64"
    ) as running:
        assert running.complete([5] * 40, 4).cached_tokens == 0
        assert running.complete([5] * 40, 4).cached_tokens == 0
        assert "prefix caching" in running.log.read_text().lower()


BAD_REQUESTS = {
    "prompt too long": ({"prompt": [5] * 500}, "128"),
    "token id out of range": ({"prompt": [5, 10**7]}, "10000000"),
    "negative token id": ({"prompt": [5, -1]}, "-1"),
    "empty prompt": ({"prompt": []}, "prompt"),
    "no prompt": ({}, "prompt"),
    "bad temperature": ({"prompt": [5], "temperature": -1}, "temperature"),
    "bad n": ({"prompt": [5], "n": 0}, "n"),
    "zero max_tokens": ({"prompt": [5], "max_tokens": -3}, "max_tokens"),
    "wrong type": ({"prompt": [5], "max_tokens": "x"}, "max_tokens"),
    "logit bias id": ({"prompt": [5], "logit_bias": {"10000000": 1}}, "10000000"),
    "stream_options without stream": (
        {"prompt": [5], "stream_options": {"include_usage": True}},
        "stream_options",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_requests_get_an_error_object(server: Server, case: str) -> None:
    fields, word = BAD_REQUESTS[case]
    reply = server.request("POST", "/v1/completions", {"model": "m", "max_tokens": 4} | fields)
    assert reply.status == 400, reply
    error = reply.body["error"]
    assert word in error["message"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["code"] == 400
    assert len(server.complete([5, 6, 7], 4).token_ids) == 4


def test_unknown_model_is_404(server: Server) -> None:
    reply = server.request("POST", "/v1/completions", {"model": "other", "prompt": "a"})
    assert reply.status == 404
    assert reply.body["error"]["param"] == "model"


def test_body_that_is_no_json_is_400(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/v1/completions", "{", {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.loads(answer.read())["error"]["code"] == 400
    connection.close()
