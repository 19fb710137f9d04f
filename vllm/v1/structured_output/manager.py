"""Grammar state of requests inside the core: compile, advance, mask.

Owns the choice and the life of the grammar library.  Must not know queues or blocks; masks are applied on the device
side.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.registry import Registry, resolve_object
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.request import Request
from vllm.v1.structured_request import Grammar, StructuredOutputRequest

logger = init_logger(__name__)

_BACKENDS = Registry(
    "structured output backend", {"guidance": "vllm.v1.structured_output.guidance:GuidanceBackend"}
)
_CONSTRAINT_CHECK = "vllm.v1.structured_output.guidance:check_constraint"
_TOKENIZER_FROM_CONFIG = "vllm.transformers_utils.tokenizer:tokenizer_from_config"
_BITS = 32


class GrammarBackend(Protocol):
    """A grammar library set up for one tokenizer."""

    def compile(self, params: StructuredOutputsParams) -> Grammar: ...


class StructuredOutputManager:
    """Compiles grammars on demand and keeps one matcher per request, on the request itself.

    Nothing is loaded before the first structured request.  A constraint that cannot be compiled ends only its own
    request.  ``tokenizer_factory`` gives the tokenizer (by default the model's own, None without one).  ``run`` starts
    a compilation and may return before it has ended (one at a time); the request waits for its grammar until then.
    By default it is done at once.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        tokenizer_factory: Callable[[], Any] | None = None,  # a tokenizer of the engine's layer
        run: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._run = run
        self._tokenizer_factory = tokenizer_factory or self._default_tokenizer
        self._backend: GrammarBackend | None = None

    def grammar_init(self, request: Request) -> None:
        """Have the request's grammar compiled unless that was done before; a failure is kept as its ``error``."""
        structured = request.structured_output_request
        if structured is None or structured.is_grammar_ready or structured.is_compiling:
            return
        structured.is_compiling = True
        if self._run is None:
            self._compile(request.request_id, structured)
        else:
            self._run(partial(self._compile, request.request_id, structured))

    def _compile(self, request_id: str, structured: StructuredOutputRequest) -> None:
        """Never raises: a request whose grammar neither comes nor fails would wait for ever."""
        try:
            structured.grammar = self._get_backend().compile(structured.params)
        except Exception as error:
            expected = isinstance(error, ValueError | ImportError)
            logger.warning(
                "Grammar of request %s cannot be compiled: %s", request_id, error, exc_info=not expected
            )
            structured.error = str(error)

    @staticmethod
    def should_constrain(request: Request) -> bool:
        """True if the next token of the request has to obey a grammar."""
        structured = request.structured_output_request
        return structured is not None and structured.grammar is not None

    def accept_tokens(self, request: Request, token_ids: list[int]) -> bool:
        """Advance the request's grammar; False if it does not allow the tokens."""
        structured = request.structured_output_request
        if structured is None or structured.grammar is None:
            return True
        return structured.grammar.accept_tokens(token_ids)

    def allowed_drafts(self, request: Request, drafts: list[int]) -> list[int]:
        """The drafts up to the first one that the grammar refuses."""
        structured = request.structured_output_request
        if structured is None or structured.grammar is None:
            return drafts
        return structured.grammar.validate_tokens([token for token in drafts if token >= 0])

    @staticmethod
    def failure(request: Request) -> str | None:
        """Why the request's grammar can be followed no further; None if that is not the case."""
        structured = request.structured_output_request
        return None if structured is None or structured.grammar is None else structured.grammar.failure()

    def grammar_bitmask(
        self, sampled: Sequence[Request], spec_tokens: Mapping[str, list[int]]
    ) -> GrammarOutput | None:
        """The masks of the constrained requests among those a step samples for, in their order; None without any."""
        constrained = [request for request in sampled if self.should_constrain(request)]
        if not constrained:
            return None
        rows = sum(1 + len(spec_tokens.get(request.request_id, ())) for request in constrained)
        bitmask = np.full((rows, -(-self._vocab_size() // _BITS)), -1, dtype=np.int32)
        row = 0
        for request in constrained:
            drafts = spec_tokens.get(request.request_id, [])
            self._fill(request, drafts, bitmask[row : row + 1 + len(drafts)])
            row += 1 + len(drafts)
        return GrammarOutput([request.request_id for request in constrained], bitmask)

    @staticmethod
    def _fill(request: Request, drafts: list[int], rows: Any) -> None:  # an int32 array, one row per position
        """Masks along the drafts; rows behind a refused draft stay open, because nothing of them is used."""
        structured = request.structured_output_request
        assert structured is not None
        assert structured.grammar is not None
        grammar = structured.grammar
        advanced = 0
        for position in range(len(drafts) + 1):
            grammar.fill_bitmask(rows[position])
            if (
                position == len(drafts)
                or drafts[position] < 0
                or not grammar.accept_tokens([drafts[position]])
            ):
                break
            advanced += 1
        grammar.rollback(advanced)

    def clear(self) -> None:
        """Let go of the grammar library; it is set up again on demand."""
        self._backend = None

    def _vocab_size(self) -> int:
        model_config = self._vllm_config.model_config
        assert model_config is not None
        return int(model_config.get_vocab_size())

    def _get_backend(self) -> GrammarBackend:
        if self._backend is None:
            tokenizer = self._tokenizer_factory()
            if tokenizer is None:
                raise ValueError("structured outputs need a tokenizer, but skip_tokenizer_init is set")
            name = self._vllm_config.structured_outputs_config.backend
            target = _BACKENDS.find("guidance" if name == "auto" else name)
            if target is None:
                raise ValueError(f"unknown structured output backend {name!r}")
            make = cast("Callable[..., GrammarBackend]", resolve_object(target))
            self._backend = make(tokenizer, self._vocab_size(), self._eos_token_ids())
        return self._backend

    def _eos_token_ids(self) -> frozenset[int]:
        model_config = self._vllm_config.model_config
        assert model_config is not None
        eos = model_config.hf_config.get("eos_token_id")
        if eos is None:
            return frozenset()
        return frozenset([eos] if isinstance(eos, int) else eos)

    def _default_tokenizer(self) -> Any:
        load = cast("Callable[[Any], Any]", resolve_object(_TOKENIZER_FROM_CONFIG))
        return load(self._vllm_config.model_config)


def validate_structured_outputs(params: StructuredOutputsParams, tokenizer: Any = None) -> None:
    """Check a constraint before the request enters the core.

    ``tokenizer`` is accepted for symmetry with the core's own compilation; the check does not depend on it.

    Raises:
        VLLMValidationError: the constraint cannot be compiled; carries the parser's message.
    """
    check = cast("Callable[[StructuredOutputsParams], None]", resolve_object(_CONSTRAINT_CHECK))
    try:
        check(params)
    except ValueError as error:
        raise VLLMValidationError(
            f"invalid structured_outputs: {error}", parameter="structured_outputs"
        ) from error


__all__ = ["StructuredOutputManager", "validate_structured_outputs"]
