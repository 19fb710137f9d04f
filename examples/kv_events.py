"""A KV event subscriber that rebuilds, per medium and group, the set of hashes a server can hit.

Run it against a server started with `--kv-events-config`: `python examples/kv_events.py tcp://127.0.0.1:5557`.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cbor2
import msgspec
import zmq

END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
SNAPSHOT = b"snapshot"

Key = tuple[str, int | None, int | bytes]


@dataclass
class CacheIndex:
    """Residency counts rebuilt from events. A key is (medium, group, hash); equal blocks may exist more than once."""

    resident: Counter[Key] = field(default_factory=Counter)
    stored: list[dict[str, Any]] = field(default_factory=list)
    removed: int = 0
    cleared: int = 0
    errors: list[str] = field(default_factory=list)

    def apply(self, event: dict[str, Any]) -> None:
        """Applies one decoded event."""
        kind = event["type"]
        if kind == "BlockStored":
            self._check(event)
            self.stored.append(event)
            for block_hash in event["block_hashes"]:
                self.resident[(event["medium"], event.get("group_idx"), block_hash)] += 1
        elif kind == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                self._remove((event["medium"], event.get("group_idx"), block_hash))
        elif kind == "AllBlocksCleared":
            self.cleared += 1
            medium = event.get("medium") or "GPU"
            self.resident = Counter({key: n for key, n in self.resident.items() if key[0] != medium})

    def hashes(self, medium: str, group: int | None = 0) -> set[int | bytes]:
        """Hashes resident on `medium` for `group`."""
        return {
            key[2]
            for key, count in self.resident.items()
            if key[0] == medium and key[1] == group and count > 0
        }

    def groups(self, medium: str) -> set[int | None]:
        """Groups that ever stored a block on `medium`."""
        return {event.get("group_idx") for event in self.stored if event["medium"] == medium}

    def _remove(self, key: Key) -> None:
        self.removed += 1
        if self.resident[key] <= 0:
            self.errors.append(f"removed but not resident: {key}")
        self.resident[key] -= 1
        if self.resident[key] <= 0:
            del self.resident[key]

    def _check(self, event: dict[str, Any]) -> None:
        wanted = len(event["block_hashes"]) * event["block_size"]
        if len(event["token_ids"]) != wanted or not event["block_hashes"]:
            self.errors.append(f"{len(event['token_ids'])} token ids for {len(event['block_hashes'])} hashes")


def prompt_hashes(token_ids: Sequence[int], facts: Mapping[str, Any]) -> list[int | bytes]:
    """The hashes of a prompt's full units of `hash_block_size` tokens as events carry them, computed here.

    `facts` is `block_hashes` of a source in `/kv_event_sources`. For prompts without salt, adapter and media, where
    nothing is looked ahead. A block of several units has the hash of its last one.

    Raises:
        ValueError: the root is not told, or the algorithm is none of the two with SHA-256.
    """
    encoders = {"sha256": _pickled, "sha256_cbor": _canonical_cbor}
    if facts["root"] is None or facts["algorithm"] not in encoders or facts["lookahead_tokens"]:
        raise ValueError(f"hashes like these cannot be computed elsewhere: {facts}")
    encode, size = encoders[facts["algorithm"]], facts["hash_block_size"]
    parent, hashes = bytes.fromhex(facts["root"]), []
    for end in range(size, len(token_ids) + 1, size):
        parent = hashlib.sha256(encode((parent, tuple(token_ids[end - size : end]), None))).digest()
        hashes.append(parent)
    return [int.from_bytes(each[-8:], "big") if facts["form"] == "uint64" else each for each in hashes]


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)  # 5, in every Python that serves


def _canonical_cbor(value: object) -> bytes:
    encoded: bytes = cbor2.dumps(value, canonical=True)
    return encoded


class Subscriber:
    """Reads a publisher's stream on a thread of its own; `batches` grows as messages arrive."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.setsockopt(zmq.RCVTIMEO, 100)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            self._context.term()
            raise
        self.batches: list[tuple[int, list[Any]]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="kv-event-subscriber", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stopped.is_set():
            try:
                _, sequence, payload = self._socket.recv_multipart()
            except zmq.Again:
                continue
            self.batches.append((int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)))

    def close(self) -> None:
        """Stops reading and closes the socket."""
        self._stopped.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()


def replay(endpoint: str, start: int = 0, timeout_ms: int = 5000) -> list[tuple[int, list[Any]]]:
    """All buffered batches from sequence `start` on, from a publisher's replay endpoint.

    Raises:
        TimeoutError: no end marker within `timeout_ms` after the last message.
    """
    return _ask(endpoint, start.to_bytes(8, "big"), timeout_ms)


def snapshot(endpoint: str, timeout_ms: int = 5000) -> list[tuple[int, list[Any]]]:
    """What is cached now, for who comes late: one batch of stores, or none if nothing was ever published.

    Subscribe first; then of the live batches those behind the snapshot's sequence number are to be applied.

    Raises:
        TimeoutError: no answer within `timeout_ms`.
    """
    return _ask(endpoint, SNAPSHOT, timeout_ms)


def _ask(endpoint: str, question: bytes, timeout_ms: int) -> list[tuple[int, list[Any]]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send_multipart([b"", question])
        batches = []
        while True:
            try:
                frames = socket.recv_multipart()
            except zmq.Again as error:
                raise TimeoutError(f"no end marker from {endpoint}") from error
            if frames[2] == END_SEQUENCE:
                return batches
            batches.append((int.from_bytes(frames[2], "big"), msgspec.msgpack.decode(frames[3])))


def rebuild(batches: list[tuple[int, list[Any]]]) -> CacheIndex:
    """The index after all `batches`; a gap in the sequence numbers is recorded as an error."""
    index = CacheIndex()
    for position, (sequence, (_, events, *_rest)) in enumerate(batches):
        if sequence != batches[0][0] + position:
            index.errors.append(f"gap before sequence {sequence}")
        for event in events:
            index.apply(event)
    return index


def missed(first: int) -> str:
    """What to tell who subscribed late: `first` is the number of the first batch that came."""
    return (
        f"the first batch seen is {first}: those before it were published earlier and are not shown. With a "
        "replay_endpoint in --kv-events-config, replay() of this file gets those still kept, snapshot() what is cached now"
    )


def main() -> None:
    """Prints every event of a publisher until interrupted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("endpoint", nargs="?", default="tcp://127.0.0.1:5557")
    endpoint = parser.parse_args().endpoint
    try:
        subscriber = Subscriber(endpoint)
    except zmq.ZMQError as error:
        parser.error(f"endpoint {endpoint!r}: {error} (expected something like tcp://127.0.0.1:5557)")
    print(f"waiting for events of {endpoint}; Ctrl-C ends", file=sys.stderr)
    shown = 0
    try:
        while True:
            for sequence, (_, events, *_rest) in subscriber.batches[shown:]:
                if shown == 0 and sequence > 0:
                    print(missed(sequence), file=sys.stderr)
                for event in events:
                    hashes = event.get("block_hashes", [])
                    place = f"{event.get('medium', '')} group {event.get('group_idx')}"
                    print(f"{sequence:6d} {event['type']:16s} {place} {len(hashes)} block(s)", flush=True)
                shown += 1
            subscriber._stopped.wait(0.1)
    except KeyboardInterrupt:
        subscriber.close()


if __name__ == "__main__":
    main()
