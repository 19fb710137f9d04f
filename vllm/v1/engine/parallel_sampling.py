"""One request with n > 1 as n child requests.  Layer L7.

Owns which children of a parent are alive and how their results join. Must not know sockets or text.
"""

from __future__ import annotations

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats


class ParentRequest:
    """The parent; it never enters the core. Its entry goes when its last child has ended, in whatever way.

    `child_requests` holds the ids of the children that have not ended. `prefill_stats` is what the request reports of
    its prompt: what its first child to have an output found.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        assert request.sampling_params is not None
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.sampling_params: SamplingParams = request.sampling_params
        self.child_requests: set[str] = set()
        self.max_num_generation_tokens = 0
        self.prefill_stats: PrefillStats | None = None
        self._finals: list[CompletionOutput | None] = [None] * self.n
        self._shared_params: SamplingParams | None = None

    @property
    def n(self) -> int:
        """Number of children."""
        return self.sampling_params.n

    def get_child_info(self, index: int) -> tuple[str, SamplingParams]:
        """Id and parameters of child `index`, which counts as alive from now on. A seed grows by one per child."""
        child_id = f"{index}_{self.request_id}"
        self.child_requests.add(child_id)
        return child_id, self._child_params(index)

    def _child_params(self, index: int) -> SamplingParams:
        if self._shared_params is not None:
            return self._shared_params
        params = self.sampling_params.clone()
        params.n = 1
        if params.seed is None:
            self._shared_params = params
        else:
            params.seed = _child_seed(params.seed, index)
        return params

    def get_outputs(self, child_id: str, completion: CompletionOutput) -> tuple[list[CompletionOutput], bool]:
        """Take one child's output; returns what to show now and whether the whole request has ended."""
        if completion.finished():
            self.child_requests.discard(child_id)
        if self.sampling_params.output_kind != RequestOutputKind.FINAL_ONLY:
            return [completion], not self.child_requests
        self._finals[completion.index] = completion
        if self.child_requests:
            return [], False
        return [final for final in self._finals if final is not None], True

    def drop_child(self, child_id: str) -> None:
        """The child ended without an output (it was aborted)."""
        self.child_requests.discard(child_id)

    def observe_finished_child(self, num_generation_tokens: int, stats: IterationStats | None) -> None:
        """Count a child's length; the figures of the parent follow when no child is left."""
        self.max_num_generation_tokens = max(self.max_num_generation_tokens, num_generation_tokens)
        if stats is not None and not self.child_requests:
            stats.n_params_iter.append(self.n)
            stats.max_num_generation_tokens_iter.append(self.max_num_generation_tokens)


def _child_seed(seed: int, index: int) -> int:
    """`seed + index` within 64 bits, without −1, which would mean "no seed"."""
    grown = seed + index + (seed < -1 <= seed + index)
    return (grown + 2**63) % 2**64 - 2**63
