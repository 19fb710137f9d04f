"""Single layers: delta rule in chunks and steps, convolution state, routing, hyper-connections, activations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm import _custom_ops as ops
from vllm.model_executor.layers.activation import by_rows, get_gated_activation
from vllm.model_executor.layers.conv1d_state import conv_sequence, conv_step
from vllm.model_executor.layers.delta_rule import DeltaInputs, chunk_delta_rule, delta_rule, l2_normalise
from vllm.model_executor.layers.fused_moe import MoeShape, SharedExpertMoE, route_sigmoid_bias
from vllm.model_executor.layers.layernorm import GatedRMSNorm, LayerNorm, OffsetRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import StackedLinear
from vllm.model_executor.layers.mhc import HyperConnection, MhcShape
from vllm.model_executor.model_loader.dummy import fill_random


def delta_inputs(tokens: int, heads: int = 3, dim: int = 8, strongest: float = 5.0) -> DeltaInputs:
    q, k = (l2_normalise(torch.randn(tokens, heads, dim)) for _ in range(2))
    v = torch.randn(tokens, heads, dim + 4)
    decay = -torch.rand(tokens, heads, dim) * strongest
    return q * dim**-0.5, k, v, decay, torch.rand(tokens, heads)


@pytest.mark.parametrize("tokens", [1, 3, 15, 16, 17, 64, 101])
@pytest.mark.parametrize(("decay_min", "strongest"), [(-5.0, 5.0), (None, 5.0), (None, 200.0), (-30.0, 30.0)])
def test_chunks_equal_the_recurrence(tokens: int, decay_min: float | None, strongest: float) -> None:
    torch.manual_seed(tokens)
    inputs = delta_inputs(tokens, strongest=strongest)
    state = torch.randn(3, 8, 12)
    expected, after = ops.delta_rule_steps_ref(inputs, state)
    result, final = chunk_delta_rule(inputs, state, decay_min)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(final, after, atol=1e-5, rtol=1e-5)


def test_delta_rule_may_be_cut_anywhere_and_leaves_its_input_state() -> None:
    torch.manual_seed(0)
    inputs, state = delta_inputs(50), torch.randn(3, 8, 12)
    kept = state.clone()
    expected, after = delta_rule(inputs, state, -5.0)
    outputs, current = [], state
    for start, end in itertools.pairwise([0, 1, 4, 21, 22, 50]):
        part, current = delta_rule(tuple(x[start:end] for x in inputs), current, -5.0)  # type: ignore[arg-type]
        outputs.append(part)
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(current, after, atol=1e-5, rtol=1e-5)
    assert torch.equal(state, kept)


def test_convolution_state_carries_over_short_and_long_chunks() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(20, 6), torch.randn(6, 4)
    expected, last = conv_sequence(x, None, weight)
    padded = torch.cat([torch.zeros(3, 6), x])
    by_hand = sum(weight[:, j] * padded[j : j + 20] for j in range(4))
    torch.testing.assert_close(expected, by_hand)
    state, outputs = None, []
    for start, end in itertools.pairwise([0, 1, 2, 9, 11, 20]):
        part, state = conv_sequence(x[start:end], state, weight)
        outputs.append(part)
    torch.testing.assert_close(torch.cat(outputs), expected)
    assert state is not None
    assert torch.equal(state, last)


def test_convolution_step_equals_the_sequence_for_many_requests() -> None:
    torch.manual_seed(0)
    x, weight, states = torch.randn(5, 6), torch.randn(6, 4), torch.randn(5, 3, 6)
    result, after = conv_step(x, states, weight)
    for n in range(5):
        expected, last = conv_sequence(x[n : n + 1], states[n], weight)
        torch.testing.assert_close(result[n : n + 1], expected)
        assert torch.equal(after[n], last)


def moe_shape(**changes: object) -> MoeShape:
    values: dict[str, object] = {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_experts": 6,
        "top_k": 2,
        "num_shared": 1,
        "scale": 2.5,
        "is_normalised": True,
        "num_groups": 1,
        "top_groups": 1,
        "limit": 10.0,
        "dtype": torch.float32,
    }
    return MoeShape(**{**values, **changes})  # type: ignore[arg-type]


def test_router_bias_takes_part_in_the_choice_only() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0, -3.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 5.0])
    weights, experts = route_sigmoid_bias(logits, bias, moe_shape())
    assert experts.tolist() == [[5, 0]]
    scores = torch.sigmoid(logits[0, [5, 0]])
    torch.testing.assert_close(weights[0], scores / scores.sum() * 2.5)
    plain, _ = route_sigmoid_bias(logits, bias, moe_shape(is_normalised=False))
    torch.testing.assert_close(plain[0], scores * 2.5)


def test_equal_router_scores_choose_the_lowest_experts() -> None:
    _, experts = route_sigmoid_bias(torch.zeros(1, 6), torch.zeros(6), moe_shape(top_k=3))
    assert experts.tolist() == [[0, 1, 2]]


def test_router_groups_limit_the_choice() -> None:
    logits = torch.tensor([[9.0, -9.0, 1.0, 1.0, 2.0, -9.0]])
    _, experts = route_sigmoid_bias(logits, torch.zeros(6), moe_shape(num_groups=3, top_groups=1))
    assert sorted(experts[0].tolist()) == [2, 3]  # the best pair, though not the best single expert


@pytest.mark.parametrize("num_shared", [0, 1, 2])
def test_experts_equal_a_loop_over_tokens_in_any_batch(num_shared: int) -> None:
    moe = SharedExpertMoE(moe_shape(num_shared=num_shared))
    with torch.inference_mode():
        fill_random(moe)
        x = torch.randn(9, 16)
        together = moe.forward(x)
        for t in range(9):
            weights, experts = route_sigmoid_bias(x[t : t + 1] @ moe.router.T, moe.router_bias, moe.shape)
            expected = sum(
                w * (ops.silu_and_mul_ref(x[t] @ moe.gate_up[e].T, 10.0) @ moe.down[e].T)
                for w, e in zip(weights[0], experts[0].tolist(), strict=True)
            )
            if moe.shared is not None:
                expected = expected + moe.shared.forward(x[t : t + 1])[0]
            torch.testing.assert_close(together[t], expected, atol=1e-5, rtol=1e-5)


def test_hyper_connection_collapses_and_merges_as_the_formula_says() -> None:
    torch.manual_seed(0)
    connection = HyperConnection(MhcShape(hidden_size=5, streams=3, eps=1e-6, iterations=20, norm_eps=1e-5))
    with torch.inference_mode():
        fill_random(connection)
        streams, output = torch.randn(4, 3, 5), torch.randn(4, 5)
        x, post, comb = connection.collapse(streams)
        merged = HyperConnection.merge(streams, output, post, comb)
        for t in range(4):
            for k in range(3):
                kept = sum(comb[t, j, k] * streams[t, j] for j in range(3))
                torch.testing.assert_close(merged[t, k], post[t, k] * output[t] + kept)
    torch.testing.assert_close(comb.sum(1), torch.ones(4, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(2), torch.ones(4, 3), atol=1e-4, rtol=0)
    assert x.shape == (4, 5)


def test_norms() -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    norm = RMSNorm(8, 1e-5, torch.float32)
    norm.weight.data.uniform_()
    torch.testing.assert_close(norm.forward(x), rms * norm.weight)
    gated = GatedRMSNorm(8, 1e-5, torch.float32)
    gated.weight.data.uniform_()
    torch.testing.assert_close(gated.forward(x, gate), rms * gated.weight * gate.sigmoid())
    layer = LayerNorm(8, 1e-6, torch.float32)
    layer.weight.data.uniform_()
    layer.bias.data.uniform_()
    expected = torch.nn.functional.layer_norm(x, (8,), layer.weight, layer.bias, 1e-6)
    torch.testing.assert_close(layer.forward(x), expected)


def test_an_offset_norm_makes_its_scale_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit as if it were made anew each time."""
    used: list[torch.Tensor] = []
    monkeypatch.setattr(ops, "rms_norm", lambda x, w, eps: used.append(w) or ops.rms_norm_ref(x, w, eps))
    x = torch.randn(3, 8).to(torch.bfloat16)
    norm = OffsetRMSNorm(8, 1e-5, torch.bfloat16)
    norm.weight.data.uniform_(-0.01, 0.01)
    for _ in range(2):
        expected = ops.rms_norm_ref(x.float(), 1 + norm.weight, 1e-5).to(x.dtype)
        assert torch.equal(norm.forward(x), expected)
        assert torch.equal(norm.forward(x), expected)
        norm.weight.data.uniform_(1, 2)
        norm.note_weights()
    first, second, third, _ = used
    assert first is second
    assert second is not third


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_activations(name: str) -> None:
    x = torch.randn(3, 16)
    gate, up = x.chunk(2, dim=-1)
    plain = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_pytorch_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    }[name]
    torch.testing.assert_close(get_gated_activation(name)(x), plain(gate) * up, atol=1e-6, rtol=1e-5)


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_act 'relu6' is not supported"):
        get_gated_activation("relu6")
    with pytest.raises(ValueError, match="only silu takes a limit"):
        get_gated_activation("gelu", limit=7.0)


@pytest.mark.parametrize("function", [torch.sigmoid, F.softplus, F.silu])
@pytest.mark.parametrize("shape", [(4,), (3, 16), (288,), (64, 128)])
def test_a_row_is_the_same_wherever_it_lies(function: Any, shape: tuple[int, ...]) -> None:
    rows = torch.randn(9, *shape, generator=torch.Generator().manual_seed(0))
    together = by_rows(function, rows)
    torch.testing.assert_close(together, function(rows))
    for start in range(9):
        for end in range(start + 1, 10):
            assert torch.equal(by_rows(function, rows[start:end]), together[start:end])


def test_stacked_linear_names_its_parts() -> None:
    stacked = StackedLinear(4, [6, 2, 2], torch.float32, bias=True)
    slots = dict(stacked.part_slots(["q", "k", "v"]))
    assert list(slots) == ["q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias"]
    for n, (name, slot) in enumerate(slots.items()):
        slot.data.fill_(n)
        assert name
    assert stacked.weight[:, 0].tolist() == [0] * 6 + [2] * 2 + [4] * 2
    assert [part.shape[1] for part in stacked.split(torch.zeros(1, 10))] == [6, 2, 2]
