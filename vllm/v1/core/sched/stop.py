"""When a request stops: end of sequence, stop tokens, length, repetition.

Owns the rules.  Must not know queues or blocks; stop *strings* are the front end's business.
Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import Request, RequestStatus

REPETITION_STOP_REASON = "repetition_detected"


def check_stop(request: Request, max_model_len: int) -> bool:
    """Test the last token of ``request``; sets status and stop reason and returns True where it ends.

    Pooling requests are not tested here: they end with their first output.
    """
    sampling, outputs = request.sampling_params, request._output_token_ids
    if sampling is None or not outputs:
        return False
    last_token = outputs[-1]
    if last_token == sampling.eos_token_id:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    stop_token_ids = sampling.stop_token_ids
    if stop_token_ids and last_token in stop_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = last_token
        return True
    if len(outputs) >= request.max_tokens or len(request._all_token_ids) >= max_model_len:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    detection = sampling.repetition_detection
    if detection is None or len(outputs) < sampling.min_tokens:
        return False
    if check_sequence_repetition(outputs, detection):
        request.status = RequestStatus.FINISHED_REPETITION
        request.stop_reason = REPETITION_STOP_REASON
        return True
    return False


def check_sequence_repetition(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """True if the tokens end with a pattern repeated at least ``min_count`` times in a row.

    Patterns of ``min_pattern_size`` (at least 1) to ``max_pattern_size`` tokens are tried; a ``max_pattern_size``
    of 0 or a ``min_count`` below 2 turns the detector off.
    """
    if params.max_pattern_size <= 0 or params.min_count < 2:
        return False
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        length = size * params.min_count
        if length > len(token_ids):
            return False
        if token_ids[-1] != token_ids[-1 - size]:  # nearly every size ends here, without a copy
            continue
        tail = token_ids[-length:]
        # Shifting a periodic sequence by its period changes nothing.
        if tail[size:] == tail[:-size]:
            return True
    return False
