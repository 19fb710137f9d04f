import pytest

from vllm import envs


def test_values_are_read_when_asked_for(monkeypatch):
    monkeypatch.delenv("VLLM_LOG_STATS_INTERVAL", raising=False)
    assert envs.VLLM_LOG_STATS_INTERVAL == 10.0
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "2")
    assert envs.VLLM_LOG_STATS_INTERVAL == 2.0
    envs.disable_envs_cache()


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("0", False), ("", False), ("No", False)]
)
def test_flags(monkeypatch, text, value):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", text)
    assert envs.VLLM_SERVER_DEV_MODE is value
    assert envs.is_set("VLLM_SERVER_DEV_MODE")


@pytest.mark.parametrize(
    ("name", "text"),
    [("VLLM_SERVER_DEV_MODE", "maybe"), ("VLLM_TARGET_DEVICE", "toaster"), ("VLLM_MAX_N_SEQUENCES", "x")],
)
def test_bad_value_names_the_variable(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name):
        getattr(envs, name)


def test_lists(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "a, b,")
    assert envs.VLLM_PLUGINS == ["a", "b"]


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="VLLM_NOPE"):
        _ = envs.VLLM_NOPE


def test_unknown_variables_come_with_the_nearest_name(monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MOD", "1")
    monkeypatch.setenv("VLLM_QQQQ", "1")
    unknown = envs.unknown_variables()
    assert unknown["VLLM_SERVER_DEV_MOD"] == "VLLM_SERVER_DEV_MODE"
    assert unknown["VLLM_QQQQ"] is None


def test_every_variable_has_a_doc_a_type_and_is_listed():
    assert dir(envs) == sorted(envs.VARIABLES)
    assert set(envs.__annotations__) - {"VARIABLES"} == set(envs.VARIABLES)
    for name, variable in envs.VARIABLES.items():
        assert variable.doc.endswith("."), name
