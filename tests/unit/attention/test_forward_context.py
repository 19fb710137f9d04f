"""The forward context: one at a time, gone afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
    set_forward_context,
)


def test_context_lasts_for_the_block_and_knows_the_layers() -> None:
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"a": 1}))
    assert not is_forward_context_available()
    with set_forward_context({"meta": 2}, config, 7, slot_mapping={"a": 3}, more=4):
        context = get_forward_context()
        assert (context.no_compile_layers, context.attn_metadata) == ({"a": 1}, {"meta": 2})
        assert context.slot_mapping == {"a": 3}
        assert context.additional_kwargs == {"num_tokens": 7, "more": 4}
    assert not is_forward_context_available()


@pytest.mark.parametrize("config", [None, SimpleNamespace()])
def test_the_config_may_be_absent_or_partial(config: object) -> None:
    with set_forward_context(None, config):
        assert get_forward_context().no_compile_layers == {}


def test_nesting_and_reading_outside_are_errors() -> None:
    with pytest.raises(AssertionError, match="no forward context is set"):
        get_forward_context()
    with set_forward_context(None, None), pytest.raises(AssertionError, match="must not be nested"):  # noqa: SIM117
        with set_forward_context(None, None):
            pass


def test_the_context_is_gone_after_an_error_and_may_be_overridden() -> None:
    with pytest.raises(RuntimeError, match="boom"), set_forward_context(None, None):
        raise RuntimeError("boom")
    assert not is_forward_context_available()
    other = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})
    with set_forward_context(None, None):
        with override_forward_context(other):
            assert get_forward_context() is other
        assert get_forward_context() is not other
