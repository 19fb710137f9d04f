"""Wide positions are kept as they came; read later, they say what a dict would have said."""

from typing import Any

import numpy as np
import pytest

from tests.helpers.tiny_tokenizers import make_tokenizer
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.logprobs import TokenTexts
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.packed_logprobs import WIDE_ROW, PackedPosition
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

TOKENIZER = make_tokenizer("byte_level")
SIZE = len(TOKENIZER)
WIDTH = WIDE_ROW + 1


def wide_lists(rows: int) -> LogprobsLists:
    """The tokenizer's vocabulary in rows that are wider than it, as beside a neighbour; the rest is padding."""
    ids = np.full((rows, WIDTH), -1, dtype=np.int32)
    for row in range(rows):
        order = np.roll(np.arange(SIZE), row)
        ids[row, 0], ids[row, 1 : SIZE + 1] = order[3], order
    values = -np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH) / 64
    values[:, 0] = values[:, 4]
    return LogprobsLists(ids, values, np.full(rows, 4, dtype=np.int32))


def outputs(packs: bool, **params: Any) -> Any:
    processor = OutputProcessor(TOKENIZER, log_stats=False, packs_wide_logprobs=packs)
    sampling = SamplingParams(output_kind=RequestOutputKind.CUMULATIVE, **params)
    processor.add_request(
        EngineCoreRequest("r", TOKENIZER.encode("hello "), None, sampling, None, 0.0, None, None, None), None
    )
    lists = wide_lists(3)
    tensors = LogprobsTensors(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks)
    tokens = lists.logprob_token_ids[:, 0].tolist()
    made = processor.process_outputs(
        [
            EngineCoreOutput(
                "r",
                tokens,
                new_logprobs=lists,
                new_prompt_logprobs_tensors=tensors,
                finish_reason=FinishReason.LENGTH,
            )
        ]
    )
    return made.request_outputs[0]


def test_a_packed_position_equals_the_dict_of_the_same_row() -> None:
    plain = outputs(False, logprobs=-1, prompt_logprobs=-1)
    packed = outputs(True, logprobs=-1, prompt_logprobs=-1)
    assert all(type(position) is dict for position in plain.outputs[0].logprobs)
    pairs = list(zip(packed.outputs[0].logprobs, plain.outputs[0].logprobs, strict=True))
    pairs += list(zip(packed.prompt_logprobs[1:], plain.prompt_logprobs[1:], strict=True))
    assert len(pairs) == 6
    for position, reference in pairs:
        assert isinstance(position, PackedPosition)
        assert list(position.items()) == list(reference.items())
        assert list(position) == list(reference)
        assert list(position.values()) == list(reference.values())
        assert len(position) == len(reference)
        assert position == reference
        token = next(iter(reference))
        assert position[token] == reference[token]
        assert position.get(SIZE + 7) is None
        assert -1 not in position
    assert packed.outputs[0].cumulative_logprob == plain.outputs[0].cumulative_logprob


def test_nothing_of_a_wide_row_is_decoded_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    text = TokenTexts.text

    def counting(self: TokenTexts, token_id: int, context: Any) -> str:
        asked.append(token_id)
        return text(self, token_id, context)

    monkeypatch.setattr(TokenTexts, "text", counting)
    made = outputs(True, logprobs=-1, prompt_logprobs=-1)
    assert asked == []
    position = made.outputs[0].logprobs[0]
    first = next(iter(position.items()))
    assert asked == [first[0]]
    assert isinstance(first[1], Logprob)


@pytest.mark.parametrize(
    "params", [{"logprobs": 3}, {"logprob_token_ids": [5, 6]}, {"logprobs": -1, "flat_logprobs": True}]
)
def test_narrow_named_and_flat_positions_are_never_packed(params: dict[str, Any]) -> None:
    packed, plain = outputs(True, **params).outputs[0].logprobs, outputs(False, **params).outputs[0].logprobs
    assert type(packed) is (FlatLogprobs if "flat_logprobs" in params else list)
    assert all(type(position) is dict for position in packed)
    assert list(packed) == list(plain)
