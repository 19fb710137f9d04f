"""The retention hint of a request: its fields, their bounds, and the short form."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.kv_retention import RetentionHint, RetentionLevel, from_cache_control, parse_retention


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ({}, RetentionHint()),
        ({"pin": True}, RetentionHint(RetentionLevel.PINNED)),
        ({"pin": True, "priority": "high", "ttl": 90}, RetentionHint(RetentionLevel.PINNED, 90.0)),
        ({"priority": "low"}, RetentionHint(RetentionLevel.LOW)),
        ({"priority": "high", "ttl": "2h"}, RetentionHint(RetentionLevel.HIGH, 7200.0)),
        ({"ttl": 0.5, "pin": None, "priority": None, "id": None}, RetentionHint(ttl_s=0.5)),
        ({"id": "a/1", "superseded_by": "a/2"}, RetentionHint(name="a/1", superseded_by="a/2")),
    ],
)
def test_fields(value: dict[str, Any], hint: RetentionHint) -> None:
    assert parse_retention(value) == hint


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "kv_retention must be a mapping, got None"),
        ("pin", "kv_retention must be a mapping, got 'pin'"),
        ({"pinned": True}, "no field 'pinned' .did you mean 'pin'..; known: pin, priority, ttl"),
        ({1: True}, "no field 1; known"),
        ({"pin": 1}, "kv_retention.pin must be true or false, got 1"),
        ({"pin": True, "priority": "low"}, "pin=true and priority='low' exclude each other"),
        ({"priority": 3}, "kv_retention.priority must be one of low, normal, high, got 3"),
        ({"priority": "HIGH"}, "priority must be one of low, normal, high, got 'HIGH'"),
        ({"ttl": 0}, "kv_retention.ttl must be seconds .* got 0"),
        ({"ttl": float("nan")}, "got nan"),
        ({"ttl": float("inf")}, "got inf"),
        ({"ttl": 10**400}, "at most 7 days, got 1000"),
        ({"ttl": True}, "got True"),
        ({"ttl": "5"}, "got '5'"),
        ({"ttl": "m"}, "got 'm'"),
        ({"ttl": ""}, "got ''"),
        ({"ttl": "-5m"}, "got '-5m'"),
        ({"ttl": "٣m"}, "ttl must be"),
        ({"ttl": "8d"}, "at most 7 days, got '8d'"),
        ({"id": ""}, "kv_retention.id must be a text of 1 to 256 characters, got ''"),
        ({"id": 5}, "kv_retention.id must be"),
        ({"superseded_by": "x" * 257}, "kv_retention.superseded_by must be"),
        ({"id": "a", "superseded_by": "a"}, "must differ from kv_retention.id, both are 'a'"),
    ],
)
def test_wrong_values_are_named(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_retention(value)


def test_the_short_form() -> None:
    assert parse_retention(from_cache_control({"type": "ephemeral"})) == RetentionHint(
        RetentionLevel.HIGH, 300.0
    )
    null = from_cache_control({"type": "ephemeral", "ttl": None})
    assert null == from_cache_control({"type": "ephemeral"}), "a null is the default, not without end"
    hour = parse_retention(from_cache_control({"type": "ephemeral", "ttl": "1h"}))
    assert hour == RetentionHint(RetentionLevel.HIGH, 3600.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ephemeral", "cache_control must be"),
        ({"ttl": "5m"}, "cache_control must be"),
        ({"type": "persistent"}, "cache_control must be .*persistent"),
        ({"type": "ephemeral", "scope": "x"}, "cache_control has no field 'scope'"),
        ({"type": "ephemeral", "ttl": "soon"}, "cache_control.ttl must be seconds"),
    ],
)
def test_wrong_short_forms_are_named(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_cache_control(value)
