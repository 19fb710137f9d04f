"""Lines between the ranks of one machine: every byte, however many, and an end that is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
import torch

from vllm.distributed import local_mesh
from vllm.distributed.local_mesh import CHUNK_BYTES, LocalMesh

RANKS = 3


def on_all_ranks(work: Callable[[int, LocalMesh], object]) -> list[object]:
    """`work` on ranks that are threads; an error of one is its result."""
    addresses, met = [b""] * RANKS, threading.Barrier(RANKS)
    results: list[object] = [None] * RANKS

    def run(rank: int) -> None:
        def tell(address: bytes) -> list[bytes]:
            addresses[rank] = address
            met.wait()
            return addresses

        mesh = LocalMesh(rank, RANKS, tell)
        try:
            results[rank] = work(rank, mesh)
        except Exception as error:
            results[rank] = error
        finally:
            mesh.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 40 * CHUNK_BYTES + 7])
def test_every_byte_arrives(size: int) -> None:
    parts = [torch.randint(0, 255, (size,), dtype=torch.uint8) for _ in range(RANKS)]

    def work(rank: int, mesh: LocalMesh) -> tuple[list[torch.Tensor], torch.Tensor]:
        gathered = mesh.gather(parts[rank])
        told = parts[rank].clone()
        mesh.broadcast(told, 1)
        return gathered, told

    for gathered, told in on_all_ranks(work):
        assert all(torch.equal(got, part) for got, part in zip(gathered, parts, strict=True))
        assert torch.equal(told, parts[1])


def test_small_default_buffers_do_not_make_two_senders_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SmallSocket(socket.socket):
        def __init__(
            self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None
        ) -> None:
            super().__init__(family, type, proto, fileno)
            self.settimeout(10)
            self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES // 8)

    monkeypatch.setattr(socket, "socket", SmallSocket)
    part = torch.arange(4 * CHUNK_BYTES, dtype=torch.int32).to(torch.uint8)
    for gathered in on_all_ranks(lambda rank, mesh: mesh.gather(part)):
        assert isinstance(gathered, list), gathered
        assert all(torch.equal(got, part) for got in gathered)


def test_a_rank_that_leaves_ends_the_others_wait() -> None:
    def work(rank: int, mesh: LocalMesh) -> object:
        return None if rank == 2 else mesh.gather(torch.zeros(5))

    first, second, left = on_all_ranks(work)
    assert left is None
    assert isinstance(first, ConnectionError)
    assert isinstance(second, ConnectionError)


def test_another_users_process_is_sent_away(monkeypatch) -> None:
    here, there = socket.socketpair()
    assert not local_mesh._is_stranger(here)
    with monkeypatch.context() as other:
        other.setattr(local_mesh.os, "geteuid", lambda: -1)
        assert local_mesh._is_stranger(here)
    here.close()
    there.close()

    # Who comes first is a stranger, who comes then the other rank.
    strangers = iter([True])
    monkeypatch.setattr(local_mesh, "_is_stranger", lambda line: next(strangers, False))
    came, addresses = threading.Event(), [b"", b""]
    stranger = socket.socket(socket.AF_UNIX)

    def tell(address: bytes) -> list[bytes]:
        addresses[0] = address
        stranger.connect(address)
        came.set()
        return addresses

    def join(_: bytes) -> list[bytes]:
        assert came.wait(10)
        return addresses

    told: list[float] = []

    def be_rank_1() -> None:
        mesh, tensor = LocalMesh(1, 2, join), torch.zeros(2)
        mesh.broadcast(tensor, 0)
        told.extend(tensor.tolist())
        mesh.close()

    partner = threading.Thread(target=be_rank_1)
    partner.start()
    mesh = LocalMesh(0, 2, tell)
    mesh.broadcast(torch.ones(2), 0)
    partner.join()
    assert told == [1.0, 1.0]
    assert stranger.recv(1) == b""
    stranger.close()
    mesh.close()
