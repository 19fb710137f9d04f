"""`make serve`: `vllm serve` with prefix caching, CPU offload and KV events on, and a ready-made curl line once it answers."""

from __future__ import annotations

import argparse
import errno
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

from vllm import envs

CPU_POOL_BYTES = 1 << 30
EVENTS_PORT = 5557
READY_POLL_S = 0.2


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there. Connections that a stopped server left behind do not count."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        except OverflowError:
            return True  # no port at all: the server says what may be one
    return True


def events_endpoint(claim: socket.socket) -> str:
    """The usual KV event port, or one chosen by the system where that port is taken.

    The engine binds the port only seconds later, so two demo servers that start together must not both see it free:
    `claim`, an unbound Unix socket, takes the port's name until this process ends.
    """
    try:
        claim.bind(f"\0vllm-serve-events-{EVENTS_PORT}")
    except OSError:
        return "tcp://*:0"
    return f"tcp://*:{EVENTS_PORT if port_is_free('0.0.0.0', EVENTS_PORT) else 0}"


def command(model: Path, name: str, events: str, args: argparse.Namespace, extra: list[str]) -> list[str]:
    """The `vllm serve` command line."""
    transfer = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": CPU_POOL_BYTES},
    }
    publishing = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
    return [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(model),
        *("--served-model-name", name),
        *("--host", args.host, "--port", str(args.port)),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--kv-events-config", json.dumps(publishing)),
        *extra,
    ]


def example_body(name: str) -> dict[str, object]:
    """A first request. Greedy and bounded: a small model at temperature 1 may ramble up to its context length."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return {"model": name, "messages": messages, "temperature": 0, "max_tokens": 64}


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
    body = json.dumps(example_body(name))
    print(
        f"\nReady. Try:\n\n  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
        f"{cache_page_line(url)}\n",
        flush=True,
    )


def cache_page_line(url: str) -> str:
    """Where the live page of the cache is, or how to get it."""
    if envs.VLLM_SERVER_DEV_MODE:
        return f"The cache, live: {url}/cache"
    return "A live page of the cache: VLLM_SERVER_DEV_MODE=1 make serve, then /cache"


def main(argv: list[str] | None = None) -> int:
    """Exit status of the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args, extra = parser.parse_known_args(argv)
    # Else the other server's answer would look like ours.
    if not port_is_free(args.host, args.port):
        print(f"[serve] error: port {args.port} of {args.host} is in use: make serve PORT=…", file=sys.stderr)
        return 1
    model = resolve_model(args.model)
    name = args.model or MODEL_NAME
    claim = socket.socket(socket.AF_UNIX)
    child = subprocess.Popen(command(model, name, events_endpoint(claim), args, extra))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: child.send_signal(received))
    threading.Thread(
        target=announce, args=(f"http://{args.host}:{args.port}", name, child), daemon=True
    ).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
