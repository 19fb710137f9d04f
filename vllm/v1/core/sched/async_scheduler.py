"""The scheduler with one step of look-ahead: a step is scheduled before the previous one's tokens are known.

Owns the placeholders of tokens under way.  Results are applied by the base class.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.step_output import StepPlan


class AsyncScheduler(Scheduler):
    """Counts tokens that will be sampled as if they were there; the workers feed the real ones back themselves.

    A request certain to reach its length limit by tokens under way is not scheduled again.
    """

    looks_ahead: ClassVar[bool] = True

    def _look_ahead(self, plan: StepPlan, partial: set[str]) -> None:
        num_spec_tokens = self.params.num_spec_tokens
        stages = self.params.pipeline_parallel_size
        for requests in (plan.running, plan.admitted):
            for request in requests:
                request_id = request.request_id
                if request_id in partial:
                    continue
                request.num_output_placeholders += 1 + len(plan.spec_tokens.get(request_id, ()))
                if num_spec_tokens:
                    request.spec_token_ids = [-1] * num_spec_tokens
                if stages > 1:
                    # The first stage needs the token that the last stage samples.
                    request.next_decode_eligible_step = self.current_step + stages


__all__ = ["AsyncScheduler"]
