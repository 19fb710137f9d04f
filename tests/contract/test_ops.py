"""Every op gives what its torch reference gives, on each instruction set that this machine has.

Where the native library is not built, the dispatching functions are the references, and the tests still hold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from vllm import _custom_ops as ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def available_sets() -> list[str]:
    """Instruction sets to test; "none" stands for a build without the library."""
    sets = [name for name in ("scalar", "avx2", "avx512") if ops.select_native_isa(name)]
    ops.select_native_isa("auto")
    return sets or ["none"]


@pytest.fixture(params=available_sets(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.select_native_isa(request.param)
    assert ops.native_isa() == request.param
    yield request.param
    ops.select_native_isa("auto")


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[dtype] * scale
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 64, 576, 1000])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
    close(ops.rms_norm(x, weight, 1e-5), ops.rms_norm_ref(x, weight, 1e-5), dtype, 3)
    split = torch.randn(5, 2, size).to(dtype)
    close(ops.rms_norm(split[:, 1], weight, 1e-5), ops.rms_norm_ref(split[:, 1], weight, 1e-5), dtype, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [9, 64, 576])
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype, size: int) -> None:
    x, weight, residual = (
        torch.randn(3, size).to(dtype),
        torch.randn(size).to(dtype),
        torch.randn(3, size).to(dtype),
    )
    mine, reference = residual.clone(), residual.clone()
    result = ops.add_rms_norm(x, mine, weight, 1e-5)
    close(result, ops.add_rms_norm_ref(x, reference, weight, 1e-5), dtype, 3)
    assert torch.equal(mine, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("size", [5, 96, 1536])
def test_silu_and_mul(dtype: torch.dtype, limit: float | None, size: int) -> None:
    x = (torch.randn(4, 2 * size) * 4).to(dtype)
    close(ops.silu_and_mul(x, limit), ops.silu_and_mul_ref(x, limit), dtype, 2)


@pytest.mark.parametrize("limit", [None, 1.5])
def test_silu_and_mul_keeps_nan_and_survives_large_values(limit: float | None) -> None:
    x = torch.tensor([[float("nan"), 1.0, 200.0, -200.0, 1.0, float("nan"), 3.0, 3.0]])
    result = ops.silu_and_mul(x, limit)
    assert result.isnan().tolist() == [[True, True, False, False]]
    torch.testing.assert_close(result[:, 2:], ops.silu_and_mul_ref(x, limit)[:, 2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [2, 20, 64])
def test_rotary(dtype: torch.dtype, interleaved: bool, rotated: int) -> None:
    whole = torch.randn(6, 9, 64).to(dtype)
    cos_sin = torch.randn(6, rotated)
    mine, reference = whole.clone(), whole.clone()
    ops.rotary(mine[:, 2:7], cos_sin, interleaved)
    ops.rotary_ref(reference[:, 2:7], cos_sin, interleaved)
    close(mine, reference, dtype, 3)
    assert torch.equal(mine[:, 7:], whole[:, 7:])


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 576, 50), (3, 37, 9), (6, 64, 3), (9, 16, 128), (200, 40, 6)]
)
def test_linear(
    x_dtype: torch.dtype, weight_dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    x, weight = torch.randn(rows, inputs).to(x_dtype), torch.randn(outputs, inputs).to(weight_dtype)
    bias = torch.randn(outputs).to(x_dtype)
    exact = x.double() @ weight.double().T
    for result, expected in (
        (ops.linear(x, weight), exact),
        (ops.linear(x, weight, bias), exact + bias.double()),
    ):
        assert result.dtype == x_dtype
        close(result.double(), expected, x_dtype, 10)


def test_linear_takes_no_rows() -> None:
    assert ops.linear(torch.randn(0, 8), torch.randn(4, 8).half()).shape == (0, 4)


def make_pages(shape: tuple[int, ...], dtype: torch.dtype, poison: bool = True) -> torch.Tensor:
    """Pages as strided views: other caches' bytes lie between them."""
    width = 1
    for n in shape[1:]:
        width *= n
    memory = torch.full((shape[0], width + 24), float("nan") if poison else 0.0, dtype=dtype)
    return memory[:, 8 : 8 + width].unflatten(1, shape[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_skips_negative_slots_and_the_null_block(dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 10, 16).to(dtype)
    key, value = qkv[:, 4:7], qkv[:, 7:10]
    slots = torch.tensor([9, -1, 3, 31, 4])
    mine, reference = make_pages((8, 3, 4, 32), dtype), make_pages((8, 3, 4, 32), dtype)
    ops.write_kv(mine, key, value, slots)
    ops.write_kv_ref(reference, key, value, slots)
    torch.testing.assert_close(mine, reference, equal_nan=True, atol=0, rtol=0)
    assert mine[0].isnan().all()
    assert torch.equal(mine[2, :, 1, :16], key[0])
    assert torch.equal(mine[1, :, 0, 16:], value[4])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bfloat16])
def test_copy_blocks_between_and_within_tensors(dtype: torch.dtype) -> None:
    source = torch.randn(9, 40).mul(50).to(dtype)[:, 3:36]
    target = torch.zeros(7, 33, dtype=dtype)
    ids = torch.tensor([5, 0, 6]), torch.tensor([8, 2, 3])
    ops.copy_blocks(target, source, *ids)
    reference = torch.zeros_like(target)
    ops.copy_blocks_ref(reference, source, *ids)
    assert torch.equal(target, reference)
    ops.copy_blocks(target, target, torch.tensor([1, 2]), torch.tensor([5, 6]))
    assert torch.equal(target[1:3], reference[5:7])


@pytest.mark.parametrize("width", [1, 63, 4096, 4097, 16384, 16385 + 4096, 3 * 16384 + 200])
@pytest.mark.parametrize(("target_shift", "source_shift"), [(0, 0), (0, 3), (5, 0), (63, 33)])
def test_copy_blocks_moves_exactly_its_bytes(width: int, target_shift: int, source_shift: int) -> None:
    source = torch.randint(-128, 128, (3, width + 80), dtype=torch.int8)
    target = torch.full((3, width + 80), 7, dtype=torch.int8)
    into, out_of = slice(target_shift, target_shift + width), slice(source_shift, source_shift + width)
    ops.copy_blocks(target[:, into], source[:, out_of], torch.tensor([2, 0]), torch.tensor([1, 2]))
    wanted = torch.full_like(target, 7)
    wanted[2, into], wanted[0, into] = source[1, out_of], source[2, out_of]
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1), (20, 2)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (24, 40), (128, 128)])
def test_paged_decode_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, key_dim: int, value_dim: int
) -> None:
    rng = random.Random(heads * key_dim)
    block_size, lengths = 16, [1, 15, 16, 17, 70, 1300]
    lows = [0, 3, 0, 16, 33, 700]
    table, pages = paged_case(
        rng, lengths, lows, make_pages((120, kv_heads, block_size, key_dim + value_dim), dtype)
    )
    q = torch.randn(len(lengths), heads + 2, key_dim).to(dtype)[:, 1:-1]
    inputs = (table, torch.tensor(lengths, dtype=torch.int32), torch.tensor(lows, dtype=torch.int32))
    mine = torch.empty(len(lengths), heads, value_dim, dtype=dtype)
    ops.paged_decode_attention(mine, q, pages, *inputs, 1300, 0.17)
    reference = torch.empty(mine.shape)
    ops.paged_decode_attention_ref(reference, q.float(), pages.float(), *inputs, 0.17)
    close(mine.float(), reference, dtype, 4)


def paged_case(
    rng: random.Random, lengths: list[int], lows: list[int], pages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A shuffled block table (null where nothing is read) and pages that hold numbers only where they may be read."""
    size = pages.shape[2]
    free = list(range(1, pages.shape[0]))
    rng.shuffle(free)
    table = torch.zeros(len(lengths), -(-max(lengths) // size) + 3, dtype=torch.int32)
    for r, (length, low) in enumerate(zip(lengths, lows, strict=True)):
        for p in range(low, length):
            if table[r, p // size] == 0:
                table[r, p // size] = free.pop()
            block = pages[int(table[r, p // size])]
            block[:, p % size] = torch.randn(block.shape[0], block.shape[2]).to(pages.dtype)
    return table, pages


def test_paged_decode_attention_keeps_nan() -> None:
    pages = torch.randn(3, 1, 4, 32)
    pages[2, 0, 1, 3] = float("nan")
    out = torch.empty(2, 1, 16)
    table = torch.tensor([[1, 2], [1, 1]], dtype=torch.int32)
    lengths, lows = torch.tensor([7, 7], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    ops.paged_decode_attention(out, torch.randn(2, 1, 16), pages, table, lengths, lows, 7, 0.25)
    assert out[0].isnan().any()
    assert not out[1].isnan().any()


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (128, 128), (8, 70)])
def test_delta_rule_step_reads_one_page_and_writes_another(key_dim: int, value_dim: int) -> None:
    torch.manual_seed(0)
    requests, heads = 4, 3
    wide = torch.randn(requests, 2, heads, key_dim)
    q, k = wide[:, 0], wide[:, 1]
    v, g = torch.randn(requests, heads, value_dim), -torch.rand(requests, heads, key_dim) * 3
    beta = torch.rand(requests, heads)
    states = make_pages((7, heads, key_dim, value_dim), torch.float32, poison=False)
    states.copy_(torch.randn(states.shape))
    source, target = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 5, 0, 6])
    mine, reference = states.clone(), states.clone()
    inputs = (q / key_dim**0.5, k / key_dim**0.5, v, g, beta)
    result = ops.delta_rule_step(inputs, mine, source, target)
    expected = ops.delta_rule_step_ref(inputs, reference, source, target)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)
    assert torch.equal(mine[[0, 2, 3, 4]], states[[0, 2, 3, 4]])


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_mhc_weights(streams: int) -> None:
    width = (2 + streams) * streams
    inputs = (torch.randn(6, width) * 2, torch.randn(3), torch.randn(width), 1e-6, 20)
    for mine, reference in zip(ops.mhc_weights(*inputs), ops.mhc_weights_ref(*inputs), strict=True):
        torch.testing.assert_close(mine, reference, atol=2e-5, rtol=2e-5)


def test_unknown_instruction_set_is_refused() -> None:
    before = ops.native_isa()
    assert not ops.select_native_isa("sse9")
    assert ops.native_isa() == before
