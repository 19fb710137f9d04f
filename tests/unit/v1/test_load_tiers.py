"""Which tiers a request may load from, as its parameters say; and keys under their public names."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.kv_offload.base import (
    ALL,
    Locality,
    Medium,
    TierFilter,
    TierMatcher,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
    parse_tier_filter,
)
from vllm.v1.request import Request


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (None, [("CPU", "LOCAL"), ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE")]),
        ([], []),
        ([{"medium": "CPU"}], [("CPU", "LOCAL")]),
        ([{"medium": "storage"}], [("STORAGE", "LOCAL"), ("STORAGE", "REMOTE")]),
        ([{"locality": "LOCAL"}], [("CPU", "LOCAL"), ("STORAGE", "LOCAL")]),
        ([{"medium": None, "locality": "LOCAL"}], [("CPU", "LOCAL"), ("STORAGE", "LOCAL")]),
        ([{"medium": "STORAGE", "locality": "REMOTE"}], [("STORAGE", "REMOTE")]),
        (
            [{"medium": "CPU"}, {"medium": "STORAGE"}],
            [("CPU", "LOCAL"), ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE")],
        ),
    ],
)
def test_a_filter_allows_what_one_of_its_matchers_names(value: Any, allowed: list[tuple[str, str]]) -> None:
    params = {"remote_host": "h"} if value is None else {"load_tier_filter": value}
    chosen = parse_tier_filter(params)
    places = [("CPU", "LOCAL"), ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE")]
    assert [place for place in places if chosen.allows(*place)] == allowed


def test_without_parameters_every_tier_is_allowed() -> None:
    assert parse_tier_filter(None) is ALL
    assert Request("r", [1], SamplingParams(), None).load_tiers is ALL
    matchers = (TierMatcher(Medium.CPU), TierMatcher(locality=Locality.REMOTE))
    extra = {"kv_transfer_params": {"load_tier_filter": [{"medium": "CPU"}, {"locality": "REMOTE"}]}}
    assert Request("r", [1], SamplingParams(extra_args=extra), None).load_tiers == TierFilter(matchers)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("CPU", "load_tier_filter must be a list of mappings, got 'CPU'"),
        ({"medium": "CPU"}, "must be a list of mappings"),
        (["CPU"], "must hold mappings with medium or locality, got 'CPU' in it"),
        ([{}], "must hold mappings with medium or locality, got {} in it"),
        ([{"locality": None}], "must hold mappings with medium or locality, got {'locality': None} in it"),
        (
            [{"medium": None, "locality": None}],
            "with medium or locality, got {'medium': None, 'locality': None}",
        ),
        ([{"tier": "CPU"}], "unknown key 'tier'; there are medium and locality"),
        ([{"medium": "TAPE"}], "medium must be CPU or STORAGE, got 'TAPE'"),
        ([{"medium": 3}], "medium must be CPU or STORAGE, got 3"),
        ([{"locality": "NEAR"}], "locality must be LOCAL or REMOTE, got 'NEAR'"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tier_filter({"load_tier_filter": value})


def test_a_key_is_made_of_a_hash_and_a_group() -> None:
    key = make_offload_key(BlockHash(b"h" * 32), 5)
    assert (get_offload_block_hash(key), get_offload_group_idx(key)) == (b"h" * 32, 5)
