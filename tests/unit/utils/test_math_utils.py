import pytest

from vllm.utils.checks import InvariantError, check
from vllm.utils.math_utils import cdiv, round_down, round_up


@pytest.mark.parametrize(
    ("a", "b", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (2**70 + 1, 2, 2**69 + 1)]
)
def test_cdiv_rounds_up_exactly(a, b, expected):
    assert cdiv(a, b) == expected


def test_rounding_to_multiples():
    assert (round_up(17, 16), round_up(32, 16), round_down(31, 16), round_down(32, 16)) == (32, 32, 16, 32)


def test_check_raises_with_its_message():
    check(True, "unused")
    with pytest.raises(InvariantError, match="refs=3"):
        check(False, "refs=3")
