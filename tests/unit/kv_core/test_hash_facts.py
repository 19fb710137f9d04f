"""What `/kv_event_sources` says of block hashes is enough to compute them elsewhere."""

from __future__ import annotations

import pytest

from examples.kv_events import prompt_hashes
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import block_hash
from vllm.v1.core.block_hash import convert_block_hashes, describe_hashing, init_none_hash
from vllm.v1.core.block_hasher import get_request_block_hasher
from vllm.v1.request import Request

TOKENS = [7, 0, 1 << 20, 3, 3, 3, 9, 250, 1, 2]


@pytest.fixture(autouse=True)
def _restore_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "NONE_HASH", block_hash.NONE_HASH)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.mark.parametrize("seed", [None, "17"])
@pytest.mark.parametrize(("as_numbers", "form"), [("1", "uint64"), ("0", "bytes")])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_consumer_computes_the_hashes_of_events(
    algorithm: str, as_numbers: str, form: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_numbers)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    hash_fn = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(4, hash_fn)
    request = Request("r", TOKENS, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    facts = describe_hashing(algorithm, 4)
    assert (facts["form"], facts["root_seed"]) == (form, "PYTHONHASHSEED" if seed else "constant")
    assert facts["root"] == block_hash.none_hash().hex()
    assert prompt_hashes(TOKENS, facts) == convert_block_hashes(request.block_hashes)
    assert len(request.block_hashes) == 2


@pytest.mark.parametrize(("seed", "told"), [(None, "random"), ("17", "PYTHONHASHSEED")])
def test_the_root_of_a_fast_hash_is_not_told(
    seed: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it collisions could be searched for."""
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    facts = describe_hashing("xxhash", 16, 2)
    assert facts == {
        "algorithm": "xxhash", "hash_block_size": 16, "lookahead_tokens": 2, "form": "uint64",
        "root_seed": told, "root": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match="cannot be computed elsewhere"):
        prompt_hashes(TOKENS, facts)
