"""Copies of blocks in host memory: exactly the bytes asked for, whatever sizes and places; else refused."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm import _custom_ops as ops

EDGES = (1, 63, 64, 65, 4095, 4096, 4097, 8 * 4096, 8 * 4096 + 64, 9 * 4096 - 1)


def available_sets() -> list[str]:
    """Instruction sets to test, "none" first: the reference, which is all there is without the native library."""
    sets = [name for name in ("avx512", "avx2", "scalar") if ops.select_native_isa(name)]
    ops.select_native_isa("auto")
    return ["none", *sets]


@pytest.fixture(params=available_sets(), autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The reference, and every instruction set of this processor."""
    name: str = request.param
    if name == "none":
        monkeypatch.setattr(ops, "_native", None)
    else:
        ops.select_native_isa(name)
    assert ops.native_isa() == name
    yield name
    if name != "none":
        ops.select_native_isa("auto")


def test_a_build_with_the_library_has_the_plain_instructions() -> None:
    assert ("scalar" in available_sets()) == ops.has_native_ops()


def refusal(target: torch.Tensor, source: torch.Tensor, into: list[int], out_of: list[int]) -> str:
    """What a copy is refused with."""
    try:
        ops.copy_blocks(target, source, torch.tensor(into), torch.tensor(out_of))
    except (RuntimeError, MemoryError, ValueError) as error:
        return str(error)
    return ""


def test_a_check_costs_by_the_rows_that_are_copied() -> None:
    """Also in a pool of which not even a bit per row fits into memory."""
    memories = [torch.arange(100, dtype=torch.int8), torch.zeros(100, dtype=torch.int8)]
    source, target = (
        torch.frombuffer((ctypes.c_int8 * 2**55).from_address(memory.data_ptr()), dtype=torch.int8)[:, None]
        for memory in memories
    )
    # No call within an assertion, which would print the tensors.
    copied = refusal(target, source, [7, 3, 99], [1, 2, 50])
    twice = refusal(target, source, [7, 3, 7], [1, 2, 50])
    both = refusal(target, target, [7, 3], [4, 7])
    assert copied == ""
    assert "target twice" in twice
    assert "both a source and a target" in both
    assert memories[1][[3, 7, 99]].tolist() == [2, 1, 50]
    assert memories[1].count_nonzero() == 3


def rows_at(rng: random.Random, num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of random bytes, and rows in it that begin anywhere and lie apart by anything."""
    stride = width + rng.choice((0, 0, 1, 63, 64, rng.randrange(5000)))
    memory = torch.randint(-128, 128, (num_rows * stride + 200,), dtype=torch.int8)
    return memory, memory[rng.randrange(100) :].as_strided((num_rows, width), (stride, 1))


@pytest.mark.parametrize("seed", range(25))
def test_a_copy_writes_its_bytes_and_no_other(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width = rng.choice((rng.choice(EDGES), rng.randrange(1, 20_000), rng.randrange(1, 50_000)))
    num_rows = rng.randrange(1, 20)
    memory, target = rows_at(rng, num_rows, width)
    source_memory, source = rows_at(rng, rng.randrange(1, 20), width)
    count = rng.randrange(num_rows + 1)
    into = torch.tensor(rng.sample(range(num_rows), count), dtype=torch.int64)
    out_of = torch.tensor([rng.randrange(source.shape[0]) for _ in range(count)], dtype=torch.int64)
    wanted, source_before = memory.clone(), source_memory.clone()
    wanted.as_strided(target.shape, target.stride(), target.storage_offset())[into] = source[out_of]
    ops.copy_blocks(target, source, into, out_of, threads=rng.randrange(1, 4))
    assert torch.equal(memory, wanted)
    assert torch.equal(source_memory, source_before)


def test_threads_share_a_large_copy() -> None:
    rng = random.Random(0)
    width, num_rows = 3 * 4096 + 5, 1500
    _, source = rows_at(rng, num_rows, width)
    memory, target = rows_at(rng, num_rows, width)
    into, out_of = torch.randperm(num_rows), torch.randperm(num_rows)
    wanted = memory.clone()
    wanted.as_strided(target.shape, target.stride(), target.storage_offset())[into] = source[out_of]
    ops.copy_blocks(target, source, into, out_of, threads=4)
    assert torch.equal(memory, wanted)


def test_large_copies_at_once_have_helpers_of_their_own_that_end_with_them() -> None:
    """Threads come and go as copy lanes do; every one copies twice, the second time with the helpers of the first."""
    num_rows, width = 1200, 2 * 4096

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def copies(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        source = torch.randint(-128, 128, (num_rows, width), dtype=torch.int8, generator=generator)
        target, equal = torch.zeros_like(source), True
        for _ in range(2):
            into, out_of = torch.randperm(num_rows, generator=generator), torch.arange(num_rows)
            ops.copy_blocks(target, source, into, out_of, threads=3)
            equal = equal and torch.equal(target[into], source)
        return equal

    assert copies(0)
    before = threads()
    for round_ in range(3):
        with ThreadPoolExecutor(3) as lanes:
            assert all(lanes.map(copies, range(3 * round_, 3 * round_ + 3)))
    for _ in range(1000):  # they are not waited for
        if threads() <= before:
            break
        time.sleep(0.01)
    assert threads() <= before


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_within_one_pool_reads_what_was_there(seed: int) -> None:
    """Also from some columns of the rows to others."""
    rng = random.Random(seed)
    width = rng.choice(EDGES)
    pool = torch.randint(-128, 128, (20, 2 * width), dtype=torch.int8)
    target, source = rng.sample((pool[:, :width], pool[:, width:]), 2)
    if rng.random() < 0.5:
        source = target
    ids = rng.sample(range(20), 16)
    into, out_of = torch.tensor(ids[:8]), torch.tensor(ids[8:])
    wanted = pool.clone()
    wanted.as_strided(target.shape, target.stride(), target.storage_offset())[into] = source[out_of]
    ops.copy_blocks(target, source, into, out_of, threads=2)
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize(
    ("into", "out_of", "message"),
    [
        ([-1], [0], "outside"),
        ([8], [0], "outside"),
        ([0], [-1], "outside"),
        ([0], [2**40], "outside"),
        ([1, 2, 1], [4, 5, 6], "target twice"),
        ([1, 2], [2, 3], "both a source and a target"),
        ([5], [5], "both a source and a target"),
    ],
)
def test_blocks_that_are_none_or_in_each_others_way_are_refused(
    into: list[int], out_of: list[int], message: str
) -> None:
    pool = torch.arange(8, dtype=torch.int8)[:, None].repeat(1, 5000)
    before = pool.clone()
    with pytest.raises(RuntimeError, match=message):
        ops.copy_blocks(pool, pool, torch.tensor(into), torch.tensor(out_of))
    assert torch.equal(pool, before)


@pytest.mark.parametrize(("shift", "width"), [(1, 4096), (-4096 + 1, 4096), (4000, 4096), (5, 16)])
def test_overlapping_memory_is_refused(shift: int, width: int) -> None:
    """Rows of one memory whose bytes are partly the same, though their numbers differ."""
    memory = torch.zeros(20 * 4200, dtype=torch.int8)
    target = memory[5000:].as_strided((8, width), (4200, 1))
    source = memory[5000 + shift :].as_strided((8, width), (4200, 1))
    with pytest.raises(RuntimeError, match="overlap"):
        ops.copy_blocks(target, source, *ids())


def test_overlapping_memory_with_rows_of_other_distances_is_refused() -> None:
    memory = torch.zeros(1000, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="overlap"):
        ops.copy_blocks(memory[:800].view(8, 100), memory[400:].as_strided((8, 100), (50, 1)), *ids())


def ids() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([1, 2]), torch.tensor([5, 6])


def test_target_rows_that_lie_over_each_other_are_refused() -> None:
    memory = torch.zeros(1000, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="target blocks overlap"):
        ops.copy_blocks(memory.as_strided((8, 100), (50, 1)), torch.ones(8, 100, dtype=torch.int8), *ids())


AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys, torch
from vllm import _custom_ops as ops

if sys.argv[1] == "none":
    ops._native = None
ops.select_native_isa(sys.argv[1])
mprotect = ctypes.CDLL(None, use_errno=True).mprotect
mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def rows(width):
    size = -(-3 * width // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), dtype=torch.int8)
    assert mprotect(memory.data_ptr() + size, mmap.PAGESIZE, 0) == 0  # whoever goes there dies
    return memory[size - 3 * width : size].view(3, width)

for width in map(int, sys.argv[2:]):
    target, source = rows(width), rows(width)
    source.copy_(torch.randint(-128, 128, (3, width), dtype=torch.int8))
    ops.copy_blocks(target, source, torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2]))
    assert torch.equal(target, source[[1, 0, 2]])
"""


def test_nothing_behind_the_last_row_is_touched(isa: str) -> None:
    command = [sys.executable, "-c", AT_THE_END_OF_MEMORY, isa, *(str(width) for width in EDGES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
