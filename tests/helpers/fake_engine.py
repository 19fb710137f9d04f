"""An engine client that says what a script tells it to: for tests of the HTTP layer alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError


@dataclass
class Step:
    """One piece of a sample: its text and tokens; the last one has a finish reason."""

    text: str
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Call:
    """One `generate` call."""

    prompt: dict[str, Any]
    params: SamplingParams
    request_id: str
    options: dict[str, Any]
    ended: str = "running"


def text_steps(
    pieces: Sequence[str], finish_reason: str = "stop", stop_reason: int | str | None = None
) -> list[Step]:
    """One token per piece; token ids count from 100."""
    steps = [Step(piece, [100 + number]) for number, piece in enumerate(pieces)]
    return [*steps[:-1], Step(steps[-1].text, steps[-1].token_ids, finish_reason, stop_reason)]


Script = Callable[[Call, int], Sequence[Step]]


@dataclass
class FakeEngine:
    """`script(call, sample)` gives the steps of a sample. An exception in place of a step is raised there.

    `hold`: the stream waits for this event before its last step. `position` gives the log probabilities at a token.
    """

    vllm_config: VllmConfig
    tokenizer: Any
    script: Script
    cached_tokens: int | None = 0
    kv_transfer_params: dict[str, Any] | None = None
    hold: asyncio.Event | None = None
    position: Callable[[int], Any] | None = None
    calls: list[Call] = field(default_factory=list)
    control: list[tuple[Any, ...]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=lambda: {"get_kv_event_sources": {}})
    dead: bool = False

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        call = Call(prompt, sampling_params, request_id, options)
        self.calls.append(call)
        try:
            async for output in self._outputs(call):
                yield output
            call.ended = "finished"
        finally:
            if call.ended == "running":
                call.ended = "aborted"

    async def _outputs(self, call: Call) -> AsyncGenerator[RequestOutput, None]:
        samples = [list(self.script(call, sample)) for sample in range(call.params.n)]
        longest = max(map(len, samples))
        whole = [_completion(call, sample, []) for sample in range(call.params.n)]
        for number in range(longest):
            if self.hold is not None and number == longest - 1:
                await self.hold.wait()
            await asyncio.sleep(0)
            for sample, steps in enumerate(samples):
                if number >= len(steps):
                    continue
                if isinstance(steps[number], BaseException):
                    raise steps[number]
                piece = _completion(call, sample, [steps[number]])
                if call.params.output_kind is RequestOutputKind.DELTA:
                    yield self._output(call, [piece], number == longest - 1)
                else:
                    whole[sample] = _completion(call, sample, steps[: number + 1])
        if call.params.output_kind is not RequestOutputKind.DELTA:
            yield self._output(call, whole, True)

    def _output(self, call: Call, completions: list[CompletionOutput], finished: bool) -> RequestOutput:
        ids = call.prompt["prompt_token_ids"]
        prompt_logprobs = None
        if call.params.prompt_logprobs is not None:
            at = self.position or (lambda i: {i: Logprob(-0.5, 1, self.tokenizer.decode([i]))})
            prompt_logprobs = [None, *(at(i) for i in ids[1:])]
        for completion in completions:
            if self.position is not None and completion.logprobs is not None:
                completion.logprobs = [self.position(i) for i in completion.token_ids]
        return RequestOutput(
            call.request_id,
            call.prompt.get("prompt"),
            ids,
            prompt_logprobs,
            completions,
            finished,
            num_cached_tokens=self.cached_tokens,
            num_cache_creation_tokens=0,
            kv_transfer_params=self.kv_transfer_params if finished else None,
            cached_tokens_by_source=self._by_source(),
        )

    def _by_source(self) -> dict[str, int] | None:
        """All but one of the cached tokens come from the device."""
        if self.cached_tokens is None:
            return None
        host = min(1, self.cached_tokens)
        return {"device": self.cached_tokens - host, "host": host}

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        return self.dead

    @property
    def dead_error(self) -> Exception:
        return EngineDeadError()

    async def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError()

    async def abort(self, request_id: Any, internal: bool = False) -> None:
        self.control.append(("abort", request_id))

    def __getattr__(self, name: str) -> Any:
        """Any control call: recorded, and answered from `answers` (an exception is raised)."""
        if name.startswith("__"):
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.control.append((name, *args))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def _completion(call: Call, sample: int, steps: Sequence[Step]) -> CompletionOutput:
    ids = [token for step in steps for token in step.token_ids]
    logprobs = None
    if call.params.num_logprobs is not None:
        logprobs = [
            {
                token: Logprob(-0.25, 1, step.text if number == 0 else ""),
                token + 1000: Logprob(-2.5, 2, f"alt{token}"),
            }
            for step in steps
            for number, token in enumerate(step.token_ids)
        ]
    last = steps[-1] if steps else Step("")
    return CompletionOutput(
        index=sample,
        text="".join(step.text for step in steps),
        token_ids=ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
