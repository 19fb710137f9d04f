"""Requests with `max_tokens=0`: only the prompt's log probabilities are wanted. Layer: L8.

The engine always makes one token. It is dropped, except for a prompt that fills the model's whole length: there the last
prompt token is forced to be that one token, so that the prompt as the engine sees it is one shorter.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.openai.render import RenderedPrompt
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams


def fills_model(rendered: RenderedPrompt, model_config: Any) -> bool:
    """Whether the prompt has exactly the model's length."""
    return len(rendered.token_ids) == model_config.max_model_len and len(rendered.token_ids) > 1


def force_last_token(rendered: RenderedPrompt, params: SamplingParams, model_config: Any) -> RenderedPrompt:
    """The prompt without its last token; `params` are changed so that this token is the one that is generated.

    Raises VLLMValidationError if log probabilities are taken after such a restriction, which would falsify them.
    """
    if not model_config.logprobs_mode.startswith("raw"):
        raise VLLMValidationError(
            f"a prompt of max_model_len={model_config.max_model_len} tokens can be scored with raw log probabilities only",
            parameter="prompt",
            value=len(rendered.token_ids),
        )
    params.allowed_token_ids = [rendered.token_ids[-1]]
    params.score_prompt(completes_prompt=True)
    return RenderedPrompt(rendered.token_ids[:-1], rendered.text)


async def as_prompt(
    stream: AsyncGenerator[RequestOutput, None], rendered: RenderedPrompt
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of a prompt made by `force_last_token`, with the generated position moved to the end of the prompt."""
    try:
        async for output in stream:
            output.prompt_token_ids = rendered.token_ids
            if output.prompt_logprobs and output.outputs[0].logprobs:
                output.prompt_logprobs.append(output.outputs[0].logprobs[0])
            yield output
    finally:
        await stream.aclose()
