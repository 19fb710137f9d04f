"""What a core sends can be read by a front end that has not loaded torch."""

import sys

import numpy as np
import pytest
import torch

from vllm.v1.engine.core_proc import hand_over_arrays
from vllm.v1.engine.serial import MsgpackDecoder, MsgpackEncoder
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsTensors


@pytest.mark.parametrize("width", [2, 500])  # inside the message, and as frames of their own
def test_prompt_log_probabilities_need_no_torch_to_be_read(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    tensors = LogprobsTensors(
        torch.arange(3 * width, dtype=torch.int32).view(3, width),
        -torch.arange(3 * width, dtype=torch.float32).view(3, width),
        torch.tensor([1, 2, 3]),
    )
    message = EngineCoreOutputs(
        outputs=[EngineCoreOutput("a", [5]), EngineCoreOutput("b", [6], new_prompt_logprobs_tensors=tensors)]
    )
    hand_over_arrays(message)
    frames = MsgpackEncoder().encode(message)
    monkeypatch.setitem(sys.modules, "torch", None)
    read = MsgpackDecoder(EngineCoreOutputs).decode([bytes(frame) for frame in frames])
    assert read.outputs[0].new_prompt_logprobs_tensors is None
    found = read.outputs[1].new_prompt_logprobs_tensors
    assert all(isinstance(array, np.ndarray) for array in found[:3])
    assert found.logprob_token_ids.tolist() == [
        list(range(row * width, (row + 1) * width)) for row in range(3)
    ]
    assert found.logprobs[2, 1] == -(2 * width + 1)
    assert found.selected_token_ranks.tolist() == [1, 2, 3]
