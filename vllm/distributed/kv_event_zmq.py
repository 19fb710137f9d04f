"""Publishes KV event batches on a ZMQ PUB socket and replays recent ones on a ROUTER socket.

Owns addresses, sequence numbers, the bounded queue, the replay ring and the one thread that touches
the sockets. It must not know what an event means. Layer L6.

Live message: ``[topic, sequence (8 bytes, big endian), payload]``. Replay request (REQ, or DEALER
with an empty delimiter): ``[start sequence]``; the answer is one such message per kept batch from
there on, then the end marker ``["", END_SEQ, ""]``. If batches before the oldest kept one were asked
for, the marker carries the oldest sequence before its last frame: ``["", END_SEQ, oldest, ""]``.

Who comes late, or has missed batches that are not kept, sends ``[b"snapshot"]`` instead of a start. The answer is one message
like a live one, then the end marker: its events are the stores of all that is cached now, its sequence is that of the last
batch they contain. Without any batch so far there is only the marker: nothing is cached.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from itertools import islice

import zmq

from vllm import envs
from vllm.config import KVEventsConfig
from vllm.config.kv_events import check_port_ranges, tcp_port
from vllm.distributed.kv_event_publisher import EventPublisher, PublisherCounters
from vllm.distributed.kv_event_types import EventBatch, EventCodec
from vllm.logger import init_logger

logger = init_logger(__name__)

SHUTDOWN_TIMEOUT_S = 1.0
# The thread is woken by publish and by requests; this is only how often it looks round regardless.
IDLE_POLL_MS = 1000
# Lets the last batches (a reset's, say) reach connected subscribers after the socket was closed.
LINGER_MS = 200


class ZmqEventPublisher(EventPublisher):
    """PUB publisher with replay. Addresses are offset by the data-parallel rank.

    ``bind=None`` follows the address: wildcard hosts, ``ipc://`` and ``inproc://`` are bound, other
    addresses are connected to. ``max_queue_size`` bounds the batches waiting inside the process;
    beyond it whole batches are dropped and counted, and their sequence numbers stay unused.
    Raises ``ValueError`` for addresses that cannot work and ``zmq.ZMQError`` if binding fails.
    """

    SHUTDOWN_TIMEOUT = SHUTDOWN_TIMEOUT_S
    END_SEQ = (-1).to_bytes(8, "big", signed=True)
    SNAPSHOT = b"snapshot"  # eight bytes like any start, and no sequence number gets that far

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        *,
        bind: bool | None = None,
    ) -> None:
        super().__init__(data_parallel_rank)
        if max_queue_size < 1:
            raise ValueError(f"max_queue_size must be at least 1, got {max_queue_size}")
        if buffer_steps < 0:
            raise ValueError(f"buffer_steps must not be negative, got {buffer_steps}")
        check_port_ranges(endpoint, replay_endpoint, data_parallel_rank)
        self._topic = topic.encode("utf-8")
        self._max_queue_size = max_queue_size
        # Batches with nobody named are for all.
        self._queue: deque[tuple[int, EventBatch, tuple[bytes, ...]]] = deque()
        self._snapshot_clients: deque[bytes] = deque()  # filled by the thread, emptied by the core
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._codec = EventCodec()
        self._next_seq = 0
        # Each count is written by one side only, so that none gets lost: the first by the core, the others by the thread.
        self._num_refused = 0
        self._num_sent = self._num_failed = self._num_replays = 0
        self._events_by_type: dict[str, int] = {}
        self._running = True

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        own_endpoint = self.offset_endpoint_port(endpoint, data_parallel_rank)
        own_replay = self.offset_endpoint_port(replay_endpoint, data_parallel_rank)
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(hwm)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            assert own_endpoint is not None
            binds = _binds(own_endpoint) if bind is None else bind
            bound = _open(self._pub, "endpoint", own_endpoint, binds)
            bound_replay = None
            if own_replay is not None:
                self._replay = context.socket(zmq.ROUTER)
                # A slow reader gets a whole ring and its end marker, twice over, before anything is lost.
                self._replay.setsockopt(zmq.SNDHWM, 2 * (buffer_steps + 1))
                bound_replay = _open(self._replay, "replay_endpoint", own_replay, bind=True)
        except BaseException:
            self._close_sockets()
            raise
        self._config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=bound,
            replay_endpoint=bound_replay,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            topic=topic,
            bind=bind,
        )
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        # From here on only the thread touches the sockets; its start orders the two.
        self._thread = threading.Thread(target=self._run, name="zmq-publisher", daemon=True)
        self._thread.start()
        logger.info("KV events are published on %s, replay on %s", bound, bound_replay or "no endpoint")

    # -- called by the core -------------------------------------------------------------------

    def publish(self, events: EventBatch) -> None:
        if not self._running:
            raise RuntimeError("Publisher is closed")
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        if len(self._queue) >= self._max_queue_size:
            self._num_refused += 1
            logger.warning_once("The KV event queue is full; whole batches are dropped and leave gaps.")
            return
        self._queue.append((seq, events, ()))
        self._wake()

    @property
    def wants_snapshot(self) -> bool:
        return bool(self._snapshot_clients)

    def publish_snapshot(self, events: EventBatch) -> None:
        if not self._running:
            raise RuntimeError("Publisher is closed")
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        clients = dict.fromkeys(self._snapshot_clients.popleft() for _ in range(len(self._snapshot_clients)))
        self._queue.append((self._next_seq - 1, events, tuple(clients)))
        self._wake()

    def shutdown(self) -> None:
        if not self._running:
            return
        self._running = False
        self._wake()
        self._thread.join(timeout=2 * SHUTDOWN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("The KV event thread did not end; %d batches are lost.", len(self._queue))

    def get_publisher_config(self) -> KVEventsConfig:
        return self._config

    def get_counters(self) -> PublisherCounters:
        return PublisherCounters(
            batches_sent=self._num_sent,
            batches_dropped=self._num_refused + self._num_failed,
            events_sent=dict(self._events_by_type),
            replay_requests=self._num_replays,
            queue_depth=len(self._queue),
        )

    # -- addresses ----------------------------------------------------------------------------

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int | None) -> str | None:
        """The address of a rank: port + rank for tcp, suffix ``_dp{rank}`` for inproc and ipc.

        Rank 0 (or None) and port 0 stay as they are. Other transports: ``ValueError``.
        """
        if not endpoint or not data_parallel_rank:
            return endpoint
        if endpoint.startswith(("inproc", "ipc")):
            return f"{endpoint}_dp{data_parallel_rank}"
        port = tcp_port(endpoint)
        if port is None:
            raise ValueError(
                f"Invalid endpoint {endpoint!r}: must contain 'inproc', 'ipc' or 'tcp' with a port"
            )
        if port == 0:
            return endpoint
        return f"{endpoint.rpartition(':')[0]}:{port + data_parallel_rank}"

    # -- the thread ---------------------------------------------------------------------------

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            # Full: the thread has been told often enough. Closed: it is gone.
            return

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while self._running:
                poller.poll(0 if self._queue else IDLE_POLL_MS)
                self._swallow_wakes()
                self._send_next()
                self._answer_replays()
            deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
            while self._queue and time.monotonic() < deadline:
                self._send_next()
        finally:
            self._close_sockets()
            self._wake_receiver.close()
            self._wake_sender.close()

    def _swallow_wakes(self) -> None:
        try:
            while self._wake_receiver.recv(4096):
                pass
        except BlockingIOError:
            return

    def _send_next(self) -> None:
        if not self._queue:
            return
        seq, batch, clients = self._queue.popleft()
        if clients:
            self._send_snapshot(seq, batch, clients)
            return
        try:
            payload = self._codec.encode(batch)
            # Kept first, so that a batch whose sending fails can still be replayed.
            self._ring.append((seq, payload))
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        except Exception:  # the thread's edge: one bad batch must not end the stream
            self._num_failed += 1
            logger.exception("KV event batch %d could not be published", seq)
            return
        self._num_sent += 1
        for event in batch.events:
            kind = type(event).__name__
            self._events_by_type[kind] = self._events_by_type.get(kind, 0) + 1

    def _send_snapshot(self, seq: int, batch: EventBatch, clients: tuple[bytes, ...]) -> None:
        assert self._replay is not None
        try:
            payload = self._codec.encode(batch)
            for client in clients:
                if seq >= 0:
                    message = (client, b"", self._topic, seq.to_bytes(8, "big"), payload)
                    self._replay.send_multipart(message)
                self._replay.send_multipart((client, b"", b"", self.END_SEQ, b""))
        except Exception:  # the thread's edge, as above
            logger.exception("A snapshot of the KV cache could not be sent")

    def _answer_replays(self) -> None:
        if self._replay is None:
            return
        try:
            while True:
                self._answer(self._replay, self._replay.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return
        except Exception:  # the thread's edge: a bad request must not end the stream
            logger.exception("A KV event replay request failed")

    def _answer(self, replay: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if len(frames) != 3:
            logger.warning("Ignored a replay request of %d frames (expected 3)", len(frames))
            return
        client, _, start_frame = frames
        self._num_replays += 1
        if start_frame == self.SNAPSHOT:
            if client not in self._snapshot_clients:  # else it is answered soon
                self._snapshot_clients.append(client)
            if self.wake_core is not None:
                self.wake_core()
            return
        start = int.from_bytes(start_frame, "big")
        oldest = self._ring[0][0] if self._ring else self._next_seq
        # Sequence numbers rise along the ring, so the wanted part is its end.
        wanted = sum(1 for seq, _ in self._ring if seq >= start)
        for seq, payload in islice(self._ring, len(self._ring) - wanted, None):
            replay.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
        marker = [client, b"", b"", self.END_SEQ]
        if start < oldest:
            marker.append(oldest.to_bytes(8, "big"))
        replay.send_multipart([*marker, b""])

    def _close_sockets(self) -> None:
        self._pub.close(linger=LINGER_MS)
        if self._replay is not None:
            self._replay.close(linger=LINGER_MS)


def _binds(endpoint: str) -> bool:
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    return "*" in endpoint or "::" in endpoint or "://0.0.0.0:" in endpoint


def _open(sock: zmq.Socket[bytes], name: str, endpoint: str, bind: bool) -> str:
    """Bind or connect; returns the address as others reach it. ``zmq.ZMQError`` naming the setting."""
    try:
        return _attach(sock, endpoint, bind)
    except zmq.ZMQError as error:
        raise zmq.ZMQError(error.errno, f"{name}={endpoint!r} cannot be used: {error.strerror}") from error


def _attach(sock: zmq.Socket[bytes], endpoint: str, bind: bool) -> str:
    if not bind:
        sock.connect(endpoint)
        return endpoint
    if endpoint.startswith("ipc://"):
        _refuse_taken_file(endpoint)
    if "[" in endpoint or "::" in endpoint:
        sock.setsockopt(zmq.IPV6, 1)
    if endpoint == "tcp://*:0":
        host = _node_address()
        if ":" in host:
            sock.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        sock.bind(f"tcp://{host}:0")
        return _last_endpoint(sock)
    sock.bind(endpoint)
    if tcp_port(endpoint) == 0:
        return _last_endpoint(sock)
    return endpoint


def _refuse_taken_file(endpoint: str) -> None:
    """``zmq.ZMQError`` if somebody listens there: binding would take the file away from under its subscribers.

    One that has just been closed is waited for: it may send its last batches for `LINGER_MS`.
    """
    last_look = time.monotonic() + 3 * LINGER_MS / 1000
    while _is_listened_to(endpoint.removeprefix("ipc://")):
        if time.monotonic() >= last_look:
            raise zmq.ZMQError(errno.EADDRINUSE, f"Address already in use (addr={endpoint!r})")
        time.sleep(0.02)


def _is_listened_to(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (OSError, ValueError):
            return False
    return True


def _last_endpoint(sock: zmq.Socket[bytes]) -> str:
    address = sock.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode().rstrip("\0")


def _node_address() -> str:
    """This node's address towards its network; ``RuntimeError`` naming the setting if there is none."""
    if envs.VLLM_HOST_IP:
        return envs.VLLM_HOST_IP
    for family, probe in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((probe, 80))  # a datagram socket sends nothing here
                return str(sock.getsockname()[0])
            except OSError:
                continue
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise RuntimeError("No address of this node was found; set VLLM_HOST_IP") from error
