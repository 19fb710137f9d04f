"""`make serve`: `vllm serve` with prefix caching, CPU offload and KV events on, and a ready-made curl line once it answers."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_model import MODEL_NAME, resolve_model

CPU_POOL_BYTES = 1 << 30
READY_POLL_S = 0.2


def events_endpoint() -> str:
    """The usual KV event port, or one chosen by the system where that port is taken."""
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", 5557))
        except OSError:
            return "tcp://*:0"
    return "tcp://*:5557"


def command(model: Path, name: str, args: argparse.Namespace, extra: list[str]) -> list[str]:
    """The `vllm serve` command line."""
    transfer = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": CPU_POOL_BYTES},
    }
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events_endpoint()}
    return [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(model),
        *("--served-model-name", name),
        *("--host", args.host, "--port", str(args.port)),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--kv-events-config", json.dumps(events)),
        *extra,
    ]


def announce(url: str, name: str, child: subprocess.Popen[bytes]) -> None:
    """Waits until the server answers, then prints how to talk to it."""
    while child.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    break
        except (urllib.error.URLError, OSError):
            time.sleep(READY_POLL_S)
    if child.poll() is not None:
        return
    body = {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    print(
        f"\nReady. Try:\n\n  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n",
        flush=True,
    )


def main() -> int:
    """Exit status of the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args, extra = parser.parse_known_args()
    model = resolve_model(args.model)
    name = args.model or MODEL_NAME
    child = subprocess.Popen(command(model, name, args, extra))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: child.send_signal(received))
    threading.Thread(
        target=announce, args=(f"http://{args.host}:{args.port}", name, child), daemon=True
    ).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
