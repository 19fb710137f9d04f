"""Not an example to run but what examples stand on: a `vllm serve` process and a small HTTP client.

examples/offload_roundtrip.py (`make demo-offload`) uses it, as do benchmarks and end-to-end tests. Only the standard library:
what it shows works from any client. Run by itself it prints this text.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Reply:
    """Status and decoded body of one HTTP answer."""

    status: int
    body: Any


@dataclass
class Completion:
    """What a greedy completion returned."""

    token_ids: list[int]
    text: str
    cached_tokens: int
    prompt_tokens: int
    first_top_logprobs: dict[str, float] = field(default_factory=dict)


class Server:
    """A running server: its URL, log and process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, model: str) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.model = model

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float = 120.0,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """One HTTP request; an error status is a reply, not an exception."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return Reply(answer.status, _decode(answer.read()))
        except urllib.error.HTTPError as error:
            return Reply(error.code, _decode(error.read()))

    def complete(self, prompt: str | list[int], max_tokens: int = 32, **extra: Any) -> Completion:
        """Greedy completion of exactly `max_tokens` tokens.

        Raises:
            RuntimeError: the server answered with an error.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        body |= {"ignore_eos": True, "return_token_ids": True} | extra
        reply = self.request("POST", "/v1/completions", body)
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {reply.body}\n{self.log_tail()}")
        choice, usage = reply.body["choices"][0], reply.body["usage"]
        logprobs = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            token_ids=choice["token_ids"],
            text=choice["text"],
            cached_tokens=details.get("cached_tokens") or 0,
            prompt_tokens=usage["prompt_tokens"],
            first_top_logprobs=logprobs[0],
        )

    def reset(self, external: bool = False) -> bool:
        """Drops the device's prefix cache, and with `external` every tier below it; True on success."""
        query = "?reset_external=true" if external else ""
        return bool(self.request("POST", f"/reset_prefix_cache{query}").body["success"])

    def metric(self, name: str) -> float:
        """Sum of all samples of one Prometheus metric; 0 if there is none."""
        text = str(self.request("GET", "/metrics").body)
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.split("{")[0].split(" ")[0] == name and not line.startswith("#")
        ]
        return sum(values)

    def wait_for_stores(self, timeout: float = 30.0) -> None:
        """Returns when no block waits for its copy to the CPU pool any more.

        Raises:
            TimeoutError: stores are still pending after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        quiet = 0
        while time.monotonic() < deadline:
            pending = self.metric("vllm:simple_kv_offload_pending_store_blocks")
            quiet = quiet + 1 if pending == 0 else 0
            if quiet >= 3:
                return
            time.sleep(0.1)
        raise TimeoutError(f"stores are still pending\n{self.log_tail()}")

    def log_tail(self, lines: int = 60) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> int:
        """Ends the server as an operator would (SIGTERM); its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def offload_flags(cpu_bytes: int, **extra: Any) -> list[str]:
    """Flags that turn on the CPU tier with `cpu_bytes` bytes per rank."""
    config = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use_per_rank": cpu_bytes, **extra},
    }
    return ["--kv-transfer-config", json.dumps(config)]


def event_flags(endpoint: str, replay_endpoint: str | None = None, **extra: Any) -> list[str]:
    """Flags that publish KV events over ZMQ at `endpoint`."""
    config: dict[str, Any] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        **extra,
    }
    if replay_endpoint is not None:
        config["replay_endpoint"] = replay_endpoint
    return ["--kv-events-config", json.dumps(config)]


@contextlib.contextmanager
def serve(model: Path | str, *flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Starts `vllm serve` in dev mode on a free port and yields it once it is healthy; always ends the process.

    Raises:
        RuntimeError: the server ended or was not ready in time; the message carries the end of its log.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "m", "--enable-prompt-tokens-details", *flags]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"} | (env or {})
    with tempfile.TemporaryDirectory(prefix="vllm-serve-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        server = Server(process, port, log, "m")
        try:
            _wait_ready(server)
            yield server
        finally:
            server.stop()


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(
                f"the server ended with status {server.process.returncode}\n{server.log_tail()}"
            )
        with contextlib.suppress(OSError):
            if server.request("GET", "/health", timeout=2.0).status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {READY_TIMEOUT_S:.0f} s\n{server.log_tail()}")


if __name__ == "__main__":
    print(__doc__, end="")
