"""Host memory on machines with several memory nodes. The system is played, but for one test that asks the real one."""

import ctypes
import errno
import mmap
import platform
from pathlib import Path

import pytest

from vllm.v1.simple_kv_offload import host_buffer
from vllm.v1.simple_kv_offload.copy_backends import numa
from vllm.v1.simple_kv_offload.copy_backends.numa import spread_over_nodes

MBIND, GET_MEMPOLICY = 237, 239
INTERLEAVE = 3
OF_ADDRESS = 2


class System:
    """Answers as a Linux with these memory nodes would."""

    def __init__(self, allowed: int, policy: int = 0, refuses: bool = False) -> None:
        self.allowed, self.policy, self.refuses = allowed, policy, refuses
        self.bound: list[tuple[int, int, int, int]] = []

    def __call__(self, number: int, *args: int) -> int:
        if number == GET_MEMPOLICY and args[4] == 0:
            ctypes.c_int.from_address(args[0]).value = self.policy
            return 0
        if number == GET_MEMPOLICY:
            ctypes.c_ulong.from_address(args[1]).value = self.allowed
            return 0
        assert number == MBIND
        if self.refuses:
            return -1
        self.bound.append((args[0], args[1], args[2], ctypes.c_ulong.from_address(args[3]).value))
        return 0


def play(
    monkeypatch: pytest.MonkeyPatch, system: System, with_processors: Path = Path("/no/such/file")
) -> System:
    monkeypatch.setattr(numa, "_system_call", lambda: system)
    monkeypatch.setattr(numa, "NODES_WITH_PROCESSORS", with_processors)
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    return system


def test_memory_is_spread_over_the_nodes_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    system = play(monkeypatch, System(allowed=0b1011))
    rows = host_buffer.aligned_zeros(16, 4096)
    assert system.bound == [(rows.data_ptr(), 16 * 4096, INTERLEAVE, 0b1011)]
    rows[15] = 3
    assert int(rows.sum()) == 3 * 4096


@pytest.mark.parametrize(
    ("told", "bound"),
    [
        ("0-1\n", 0b11),  # a GH200: its GPU's memory is one node, or several
        ("0-1,3", 0b1011),
        ("1,3\n", 0b1010),
        ("0-63,64-70", 0b1011),
        ("5", 0b1011),
        ("\n", 0b1011),
        ("what", 0b1011),
        (None, 0b1011),
    ],
)
def test_nodes_without_processors_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str | None, bound: int
) -> None:
    """With a file that says nothing, or nothing that fits, the nodes stay as they are."""
    file = tmp_path / "has_cpu"
    if told is not None:
        file.write_text(told)
    system = play(monkeypatch, System(allowed=0b1011), file)
    assert spread_over_nodes(1 << 20, 1 << 20) == bound.bit_count()
    assert system.bound == [(1 << 20, 1 << 20, INTERLEAVE, bound)]


def test_one_node_with_processors_beside_the_memory_of_a_gpu_is_no_reason_to_do_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "has_cpu"
    file.write_text("0\n")
    system = play(monkeypatch, System(allowed=0b11), file)
    assert spread_over_nodes(1 << 20, 1 << 20) == 0
    assert system.bound == []


@pytest.mark.parametrize(
    "system",
    [System(allowed=0b1), System(allowed=0b11, policy=INTERLEAVE), System(allowed=0b11, refuses=True)],
    ids=["one node", "the user has chosen", "forbidden"],
)
def test_nothing_is_done_where_it_is_of_no_use_or_not_wanted(
    monkeypatch: pytest.MonkeyPatch, system: System
) -> None:
    play(monkeypatch, system)
    assert spread_over_nodes(1 << 20, 1 << 20) == 0
    assert system.bound == []


def test_the_real_system_understands_us() -> None:
    """With one node all pages come from it, but the system says by which policy."""
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    call = numa._system_call()
    if spread_over_nodes(address, 1 << 20, nodes_min=1) == 0:
        assert call is None or ctypes.get_errno() in (errno.EPERM, errno.ENOSYS), "only where it is forbidden"
        return
    assert call is not None
    policy = ctypes.c_int(-1)
    get_mempolicy = numa._CALLS[platform.machine()][1]
    assert call(get_mempolicy, ctypes.addressof(policy), 0, 0, address, OF_ADDRESS) == 0
    assert policy.value == INTERLEAVE
    memory[:] = bytes([5]) * (1 << 20)
