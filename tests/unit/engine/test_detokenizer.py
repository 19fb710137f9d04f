"""Text of a growing list of tokens: whole characters only, stop strings wherever they fall."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tiny_tokenizers import make_tokenizer
from vllm.v1.engine.detokenizer import (
    UNREADABLE_TOKENS_MAX,
    IncrementalDetokenizer,
    TokenStream,
    check_stop_strings,
    held_back_length,
)

KINDS = ["byte_level", "byte_fallback"]
TEXTS = st.text(
    st.sampled_from("ab El NDé你世😀\u200d👩\n hello")
    | st.characters(exclude_categories=["Cs"], exclude_characters="▁"),
    max_size=30,
).filter(lambda text: "\ufffd" not in text and "<" not in text)


@dataclass
class Params:
    stop: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    detokenize: bool = True


@dataclass
class Request:
    prompt_token_ids: list[int]
    sampling_params: Params


def detokenizer(
    kind: str, params: Params | None = None, prompt: list[int] | None = None
) -> IncrementalDetokenizer:
    request: Any = Request(prompt or [], params or Params())
    return IncrementalDetokenizer.from_new_request(make_tokenizer(kind), request)


def feed(
    detok: IncrementalDetokenizer, ids: list[int], cuts: list[int], delta: bool
) -> tuple[list[str], str | None]:
    """Feed `ids` in pieces; return the texts shown and the stop string found."""
    shown, bounds = [], sorted({cut % (len(ids) + 1) for cut in cuts} | {0, len(ids)})
    for start, end in pairwise(bounds):
        stop = detok.update(ids[start:end], False)
        last = stop is not None or end == len(ids)
        shown.append(detok.get_next_output_text(last, delta))
        if stop is not None:
            return shown, stop
    return shown, None


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=TEXTS, prompt=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_every_split_gives_the_same_text_without_broken_characters(
    kind: str, text: str, prompt: str, cuts: list[int]
) -> None:
    tokenizer = make_tokenizer(kind)
    prompt_ids = tokenizer.encode(prompt)
    ids = tokenizer.encode(prompt + text)
    if ids[: len(prompt_ids)] != prompt_ids:
        ids = prompt_ids + tokenizer.encode("x" + text)[1:]
    output = ids[len(prompt_ids) :]
    expected = tokenizer.decode(ids)[len(tokenizer.decode(prompt_ids)) :]
    shown, _ = feed(detokenizer(kind, prompt=prompt_ids), output, cuts, delta=True)
    assert "".join(shown) == expected
    assert not any("\ufffd" in piece for piece in shown)
    cumulative, _ = feed(detokenizer(kind, prompt=prompt_ids), output, cuts, delta=False)
    assert all(later.startswith(earlier) for earlier, later in pairwise(cumulative))
    assert (cumulative or [""])[-1] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_api_04_prompt_that_ends_inside_a_character(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode("hello world 語")
    detok = detokenizer(kind, prompt=ids[:-1])
    assert detok.update([ids[-1]], False) is None
    assert detok.get_next_output_text(False, True) == "語"
    abandoned = detokenizer(kind, prompt=ids[:-1])
    abandoned.update(tokenizer.encode("ab")[-2:], False)
    assert abandoned.get_next_output_text(True, True) == "ab"
    held = detokenizer(kind, prompt=ids[:-2])
    held.update([ids[-2]], False)
    assert held.get_next_output_text(False, True) == ""
    held.update([ids[-1]], False)
    assert held.get_next_output_text(True, True) == "語"


@pytest.mark.parametrize("kind", KINDS)
def test_output_that_ends_inside_a_character_shows_none_of_it(kind: str) -> None:
    ids = make_tokenizer(kind).encode("ab你")[:-1]
    shown, _ = feed(detokenizer(kind), ids, list(range(20)), delta=True)
    assert "".join(shown) == "ab"


@pytest.mark.parametrize("kind", KINDS)
def test_endless_invalid_bytes_are_shown_and_stay_cheap(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    invalid = tokenizer.encode("語")[-2]
    sizes: list[int] = []

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            sizes.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens)

    stream = TokenStream(Counting(), None, True)
    text = "".join(stream.push(invalid) for _ in range(20 * UNREADABLE_TOKENS_MAX))
    assert set(text) == {"\ufffd"}
    assert len(text) > 18 * UNREADABLE_TOKENS_MAX
    assert max(sizes) <= 3 * UNREADABLE_TOKENS_MAX


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 5, 20, 60, 200])
def test_long_runs_of_bytes_before_and_in_the_output(kind: str, length: int) -> None:
    tokenizer = make_tokenizer(kind)
    prompt_ids = tokenizer.encode("語" * length)
    for cut in (0, 1, 2):
        ids = prompt_ids + tokenizer.encode("語" * 200 + "\x80𐀀")[-606:]
        prompt, output = prompt_ids[: len(prompt_ids) - cut], ids[len(prompt_ids) - cut :]
        expected = tokenizer.decode(ids)[length - (1 if cut else 0) :]
        shown, _ = feed(detokenizer(kind, prompt=prompt), output, list(range(1000)), delta=True)
        assert "".join(shown) == expected


def test_decoding_window_is_bounded_for_a_long_output() -> None:
    tokenizer = make_tokenizer("byte_level")
    sizes: list[int] = []

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            sizes.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens)

    stream = TokenStream(Counting(), tokenizer.encode("hello " * 1000), True)
    ids = tokenizer.encode("the quick brown fox 你好 " * 100)
    assert "".join(stream.push(i) for i in ids) == "the quick brown fox 你好 " * 100
    assert max(sizes) <= 32
    assert len(sizes) < 1.5 * len(ids) + 5


# -- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include", [False, True])
@settings(deadline=None)
@given(
    text=st.text(st.sampled_from("ENDab 你"), max_size=20),
    stops=st.lists(
        st.sampled_from(["END", "ND", "EE", "ab", "b E", "你", "EN你", "D"]), min_size=1, max_size=3
    ),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_api_01_stop_strings_do_not_depend_on_the_split(
    kind: str, include: bool, text: str, stops: list[str], cuts: list[int]
) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode("x" + text)
    text = tokenizer.decode(ids)
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    expected_stop = min(ends, key=lambda stop: (ends[stop], stops.index(stop))) if ends else None
    expected = text
    if expected_stop is not None:
        end = ends[expected_stop]
        expected = text[:end] if include else text[: end - len(expected_stop)]
    for delta in (True, False):
        params = Params(stop=stops, include_stop_str_in_output=include)
        shown, stop = feed(detokenizer(kind, params), ids, cuts, delta)
        assert stop == expected_stop
        assert ("".join(shown) if delta else shown[-1]) == expected


def test_api_01_the_example() -> None:
    for include, expected in ((False, "foo"), (True, "fooEND")):
        params = Params(stop=["END"], include_stop_str_in_output=include)
        for size in (1, 2, 3, 99):
            detok = detokenizer("byte_level", params)
            ids = make_tokenizer("byte_level").encode("fooEND bar")
            shown, stop = feed(detok, ids, list(range(0, 99, size)), delta=True)
            assert ("".join(shown), stop) == (expected, "END")


class Words:
    """A tokenizer whose tokens are the pieces of the fault case."""

    pieces = ("foo", "E", "ND bar")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in token_ids)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("include", "expected"), [(False, "foo"), (True, "fooEND")])
def test_api_01_a_stop_string_may_end_inside_a_token(include: bool, expected: str, delta: bool) -> None:
    request: Any = Request([], Params(stop=["END"], include_stop_str_in_output=include))
    for cuts in ([], [1, 2]):
        detok = IncrementalDetokenizer.from_new_request(Words(), request)
        shown, stop = feed(detok, [0, 1, 2], cuts, delta)
        assert stop == "END"
        assert ("".join(shown) if delta else shown[-1]) == expected


def test_api_03_only_what_may_become_a_stop_string_is_held_back() -> None:
    detok = detokenizer("byte_level", Params(stop=["a long stop sentence"]))
    tokenizer = make_tokenizer("byte_level")
    pieces = []
    for token_id in tokenizer.encode("hello fox jumps a long story"):
        assert detok.update([token_id], False) is None
        pieces.append(detok.get_next_output_text(False, True))
    assert "".join(pieces) == "hello fox jumps a long sto"[:-3] + "story"
    empty = sum(not piece for piece in pieces)
    assert empty <= len(tokenizer.encode(" a long sto"))


def test_stop_strings_count_only_after_min_tokens() -> None:
    ids = make_tokenizer("byte_level").encode("aaDbbDcc")
    detok = detokenizer("byte_level", Params(stop=["D"], min_tokens=4))
    shown, stop = feed(detok, ids, list(range(20)), delta=True)
    assert stop == "D"
    assert "".join(shown) == "aaDbb"


def test_stop_token_is_kept_as_token_and_hidden_as_text() -> None:
    tokenizer = make_tokenizer("byte_level")
    ids = [*tokenizer.encode("ab"), *tokenizer.encode("c")]
    detok = detokenizer("byte_level")
    detok.update(ids, True)
    assert detok.output_token_ids == ids
    assert detok.get_next_output_text(True, False) == tokenizer.decode(ids[:-1])
    shown = detokenizer("byte_level", Params(include_stop_str_in_output=True))
    shown.update(ids, True)
    assert shown.get_next_output_text(True, False) == tokenizer.decode(ids)


def test_tokens_behind_a_stop_string_are_dropped_whatever_the_split() -> None:
    ids = make_tokenizer("byte_level").encode("aDbbbb")
    counts = set()
    for size in (1, 3, 9):
        detok = detokenizer("byte_level", Params(stop=["D"]))
        feed(detok, ids, list(range(0, 99, size)), delta=True)
        counts.add(detok.num_output_tokens())
    assert counts == {len(make_tokenizer("byte_level").encode("aD"))}


def test_without_tokenizer_there_are_tokens_but_no_text() -> None:
    request: Any = Request([1], Params())
    detok = IncrementalDetokenizer.from_new_request(None, request)
    assert detok.update([4, 5], False) is None
    assert detok.output_token_ids == [4, 5]
    assert detok.get_next_output_text(True, False) == ""


@pytest.mark.parametrize(
    ("text", "new", "stop", "include", "expected"),
    [
        ("fooEND", 3, ["END"], False, ("END", 3)),
        ("fooEND", 3, ["END"], True, ("END", -1)),
        ("fooEND bar", 7, ["END"], True, ("END", 6)),
        ("fooEND bar", 4, ["END"], False, None),
        ("fooEND", 1, ["END"], False, ("END", 3)),
        ("abc", 3, ["bc", "ab"], False, ("ab", 0)),
        ("abc", 3, ["c", "bc"], False, ("c", 2)),
        ("abc", 0, ["c"], False, None),
        ("abc", 3, [], False, None),
    ],
)
def test_check_stop_strings(
    text: str, new: int, stop: list[str], include: bool, expected: tuple[str, int] | None
) -> None:
    assert check_stop_strings(text, new, stop, include) == expected


@given(text=st.text("ab", max_size=12), stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_held_back_length_is_the_longest_possible_beginning(text: str, stop: list[str]) -> None:
    lengths = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    assert held_back_length(text, stop) == max(lengths, default=0)
