import pytest

from vllm.logprobs import (
    FlatLogprobs,
    Logprob,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)

FIRST = {5: Logprob(-0.5, 1, "a"), 6: Logprob(-1.5, 2, "b")}
SECOND = {7: Logprob(-0.1, 1, "c")}


@pytest.mark.parametrize("flat", [False, True])
def test_a_position_holds_the_taken_token_and_the_top_ones(flat):
    container = create_sample_logprobs(flat)
    append_logprobs_for_next_position(container, [9, 5, 6], [-3.0, -0.5, -1.5], ["z", "a", "b"], 17, 2)
    append_logprobs_for_next_position(container, [5, 5, 6], [-0.5, -0.5, -1.5], ["a", "a", "b"], 1, 2)
    append_logprobs_for_next_position(container, [5, 5, 6], [-0.5, -0.5, -1.5], [None] * 3, 1, -1)
    assert container[0] == {9: Logprob(-3.0, 17, "z"), **FIRST}
    assert container[1] == FIRST
    assert container[2][6] == Logprob(-1.5, 2, None)
    assert len(container) == 3


@pytest.mark.parametrize("flat", [False, True])
def test_prompt_logprobs_begin_with_an_empty_position(flat):
    container = create_prompt_logprobs(flat)
    assert len(container) == 1
    assert not container[0]


def test_flat_behaves_like_a_list_of_dicts():
    flat = FlatLogprobs()
    flat.extend([FIRST, None, SECOND])
    assert list(flat) == [FIRST, {}, SECOND]
    assert list(flat[1:]) == [{}, SECOND]
    assert flat[-1] == SECOND
    with pytest.raises(IndexError):
        flat[3]


def test_flat_only_grows():
    flat = FlatLogprobs()
    flat.append(FIRST)
    for change in (
        lambda: flat.__setitem__(0, SECOND),
        lambda: flat.__delitem__(0),
        lambda: flat.insert(0, SECOND),
    ):
        with pytest.raises(TypeError):
            change()
