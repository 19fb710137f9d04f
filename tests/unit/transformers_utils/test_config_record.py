import copy
import pickle

import pytest

from vllm.transformers_utils.config_record import ConfigRecord

VALUES = {"hidden_size": 4, "rope": {"type": "yarn", "factor": 2.0}, "experts": [{"id": 1}], "none": None}


def test_values_are_attributes_and_items_at_every_depth():
    record = ConfigRecord(VALUES, model_type="x")
    assert record.hidden_size == record["hidden_size"] == 4
    assert record.rope.factor == record["rope"]["factor"] == 2.0
    assert record.experts[0].id == 1
    assert record.get("missing", 7) == 7
    assert getattr(record, "missing", None) is None
    assert "hidden_size" in record
    assert len(record) == 5
    assert record.to_dict() == {**VALUES, "model_type": "x"}


def test_missing_values_raise():
    with pytest.raises(AttributeError):
        _ = ConfigRecord({}).missing
    with pytest.raises(KeyError):
        _ = ConfigRecord({})["missing"]


def test_first_skips_absent_and_none():
    record = ConfigRecord(VALUES)
    assert record.first("missing", "none", "hidden_size") == 4
    assert record.first("none") is None


def test_update_merges_nested_objects():
    record = ConfigRecord(VALUES)
    record.update({"rope": {"factor": 4.0}, "new": {"a": 1}})
    assert record.rope.to_dict() == {"type": "yarn", "factor": 4.0}
    assert record.new.a == 1


def test_assignment_copy_and_pickle():
    record = ConfigRecord(VALUES)
    record.hidden_size = 8
    for other in (copy.deepcopy(record), pickle.loads(pickle.dumps(record)), ConfigRecord(record)):
        assert other == record
        assert other.hidden_size == 8
    assert "8" in repr(record)


def test_the_language_part_of_a_composite_config():
    assert ConfigRecord({"text_config": {"a": 1}}).get_text_config().a == 1
    plain = ConfigRecord({"a": 1})
    assert plain.get_text_config() is plain
