"""Logits processors: batch updates, the built-in rules, per-request functions, how outside ones are found."""

from __future__ import annotations

import math

import pytest
import torch

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    STR_POOLING_REJECTS_LOGITSPROCS,
    AdapterLogitsProcessor,
    BatchUpdate,
    BatchUpdateBuilder,
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    MoveDirectionality,
    build_logitsprocs,
    process_dict_updates,
    validate_logits_processors_parameters,
)

CPU = torch.device("cpu")
UNI, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return VllmConfig()


def update(size: int, removed=(), added=(), moved=()) -> BatchUpdate:
    return BatchUpdate(size, list(removed), list(added), list(moved))


def test_builder_hands_out_the_smallest_removed_row_first() -> None:
    builder = BatchUpdateBuilder()
    for row in (4, 1, 3):
        builder.removed_append(row)
    assert builder.peek_removed() == 1
    assert [builder.pop_removed() for _ in range(4)] == [1, 3, 4, None]
    assert builder.batch_changed


def test_builder_refuses_removals_once_they_were_read() -> None:
    builder = BatchUpdateBuilder()
    builder.removed_append(0)
    builder.peek_removed()
    with pytest.raises(RuntimeError, match="row 2"):
        builder.removed_append(2)
    builder.reset()
    builder.removed_append(2)


def test_builder_reports_each_change_once() -> None:
    builder = BatchUpdateBuilder()
    assert builder.get_and_reset(3) is None
    assert not builder.reset()
    builder.removed_append(2)
    builder.moved.append((1, 0, SWAP))
    taken = builder.get_and_reset(2)
    assert taken == BatchUpdate(2, [2], [], [(1, 0, SWAP)])
    assert builder.get_and_reset(2) is None
    builder.added.append((0, SamplingParams(), [1], []))
    assert builder.reset()


def test_dict_entries_follow_their_rows() -> None:
    entries = {0: "a", 1: "b", 2: "c"}
    states = iter(["d", None])
    changed = process_dict_updates(
        entries,
        update(
            3,
            removed=[1],
            added=[(3, SamplingParams(), None, []), (0, SamplingParams(), None, [])],
            moved=[(3, 1, UNI), (1, 2, SWAP)],
        ),
        lambda *_: next(states),
    )
    assert changed
    assert entries == {1: "c", 2: "d"}
    assert not process_dict_updates(entries, None, lambda *_: None)
    assert not process_dict_updates(entries, update(3, moved=[(5, 6, UNI)]), lambda *_: None)


def test_min_p_bans_tokens_far_below_the_best(config) -> None:
    processor = MinPLogitsProcessor(config, CPU, False)
    added = [
        (0, SamplingParams(min_p=0.0), [], []),
        (1, SamplingParams(min_p=0.3), [], []),
        (2, SamplingParams(min_p=1.0), [], []),
    ]
    processor.update_state(update(3, added=added))
    assert processor.is_argmax_invariant()
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    probs = logits.softmax(-1)
    result = processor.apply(logits.clone())
    for row, min_p in enumerate((0.0, 0.3, 1.0)):
        kept = probs[row] >= min_p * probs[row].max()
        assert torch.equal(torch.isfinite(result[row]), kept)
    assert processor.get_min_p_by_index(1) == pytest.approx(0.3)


def test_min_p_follows_moves_and_goes_idle(config) -> None:
    processor = MinPLogitsProcessor(config, CPU, False)
    processor.update_state(
        update(2, added=[(0, SamplingParams(min_p=0.5), [], []), (1, SamplingParams(), [], [])])
    )
    processor.update_state(update(2, moved=[(0, 1, SWAP)]))
    assert [processor.get_min_p_by_index(i) for i in range(2)] == [0.0, 0.5]
    processor.update_state(update(1, moved=[(1, 0, UNI)]))
    assert [processor.get_min_p_by_index(i) for i in range(2)] == [0.5, 0.0]
    processor.update_state(update(0, removed=[0]))
    assert processor.min_p_count == 0
    logits = torch.randn(1, 5)
    assert torch.equal(processor.apply(logits.clone()), logits)


def test_logit_bias_is_added(config) -> None:
    processor = LogitBiasLogitsProcessor(config, CPU, False)
    assert not processor.is_argmax_invariant()
    processor.update_state(
        update(
            3,
            added=[
                (0, SamplingParams(logit_bias={3: 2.5, 4: -100}), [], []),
                (1, SamplingParams(), [], []),
                (2, SamplingParams(logit_bias={0: 1.0}), [], []),
            ],
        )
    )
    result = processor.apply(torch.zeros(3, 6))
    assert result.tolist() == [[0, 0, 0, 2.5, -100, 0], [0] * 6, [1, 0, 0, 0, 0, 0]]
    processor.update_state(update(1, removed=[1], moved=[(2, 0, UNI)]))
    assert processor.apply(torch.zeros(1, 6)).tolist() == [[1, 0, 0, 0, 0, 0]]


def test_val_01_bias_outside_the_vocabulary_is_ignored_here(config) -> None:
    processor = LogitBiasLogitsProcessor(config, CPU, False)
    params = SamplingParams(logit_bias={191222: -100.0, 2: 1.0})
    processor.update_state(update(1, added=[(0, params, [], [])]))
    assert processor.apply(torch.zeros(1, 4)).tolist() == [[0, 0, 1, 0]]


def test_min_tokens_ban_stop_tokens_until_enough_were_produced(config) -> None:
    processor = MinTokensLogitsProcessor(config, CPU, False)
    params = SamplingParams(min_tokens=2, stop_token_ids=[1, 3])
    params.update_from_generation_config({}, 2)
    outputs: list[int] = []
    processor.update_state(update(2, added=[(0, SamplingParams(), [], []), (1, params, [], outputs)]))
    for _ in range(2):
        result = processor.apply(torch.zeros(2, 5))
        assert torch.isinf(result[1]).nonzero().flatten().tolist() == [1, 2, 3]
        assert torch.isfinite(result[0]).all()
        outputs.append(0)
        processor.update_state(None)
    assert torch.isfinite(processor.apply(torch.zeros(2, 5))).all()


def test_min_tokens_give_way_where_nothing_but_the_end_is_left(config) -> None:
    processor = MinTokensLogitsProcessor(config, CPU, False)
    params = SamplingParams(min_tokens=2, stop_token_ids=[1, 3])
    processor.update_state(update(2, added=[(0, params, [], []), (1, params, [], [])]))
    logits = torch.zeros(2, 4)
    logits[0, [0, 2, 3]] = -float("inf")
    result = processor.apply(logits)
    assert torch.isfinite(result).tolist() == [[False, True, False, False], [True, False, True, False]]


class ByPosition(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams):
        wish = (params.extra_args or {}).get("wish")
        if wish == "raise early":
            raise RuntimeError("no such wish")
        if wish == "raise":
            return self._raise
        if wish == "output":
            return lambda output_ids, row: row + len(output_ids)
        if wish == "prompt":
            return lambda prompt_ids, output_ids, row: row + 10 * len(prompt_ids) + len(output_ids)
        return None

    @staticmethod
    def _raise(output_ids: list[int], row: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("bad wish")


def test_per_request_functions_see_live_outputs_and_optionally_the_prompt(config) -> None:
    processor = ByPosition(config, CPU, False)
    outputs = [7]
    wishes = ["output", None, "prompt"]
    added = [(i, SamplingParams(extra_args={"wish": w}), [1, 2], outputs) for i, w in enumerate(wishes)]
    processor.update_state(update(3, added=added))
    outputs.append(8)
    assert processor.apply(torch.zeros(3, 2))[:, 0].tolist() == [2, 0, 22]


def test_a_function_that_raises_costs_only_its_row(config) -> None:
    processor = ByPosition(config, CPU, False)
    wishes = ["raise", "output", "raise early"]
    added = [(i, SamplingParams(extra_args={"wish": w}), [], []) for i, w in enumerate(wishes)]
    processor.update_state(update(3, added=added))
    result = processor.apply(torch.ones(3, 2))
    assert result[1].tolist() == [1, 1]
    assert all(math.isnan(x) for row in (0, 2) for x in result[row].tolist())


class Picky(ByPosition):
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("wish") == 3:
            raise ValueError("wish must be text")


def test_processors_are_built_in_order_and_split_by_kind(config) -> None:
    processors = build_logitsprocs(config, CPU, False, False, [f"{__name__}:Picky", Picky])
    names = [type(p).__name__ for p in processors.non_argmax_invariant]
    assert names[:2] == ["MinTokensLogitsProcessor", "LogitBiasLogitsProcessor"]
    assert [type(p).__name__ for p in processors.argmax_invariant] == ["MinPLogitsProcessor"]
    assert len(list(processors.all)) == len(names) + 1


def test_custom_processors_are_refused_where_they_cannot_work(config) -> None:
    with pytest.raises(ValueError, match=STR_POOLING_REJECTS_LOGITSPROCS):
        build_logitsprocs(config, CPU, False, True, [Picky])
    with pytest.raises(ValueError, match="must be a subclass of LogitsProcessor"):
        build_logitsprocs(config, CPU, False, False, ["builtins:int"])
    assert list(build_logitsprocs(config, CPU, False, True).all) == []


def test_custom_processors_validate_parameters() -> None:
    validate_logits_processors_parameters([Picky], SamplingParams())
    with pytest.raises(ValueError, match="wish must be text"):
        validate_logits_processors_parameters([Picky], SamplingParams(extra_args={"wish": 3}))


def test_the_interface_cannot_be_instantiated() -> None:
    with pytest.raises(TypeError):
        LogitsProcessor(None, CPU, False)  # type: ignore[abstract]
