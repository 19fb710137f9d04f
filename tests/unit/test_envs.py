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
    assert set(envs.__annotations__) - {"VARIABLES", "_UNUSED"} == set(envs.VARIABLES)
    for name, variable in envs.VARIABLES.items():
        assert variable.doc.endswith("."), name


def test_a_name_that_changes_nothing_here_is_answered_with_the_reason(monkeypatch):
    monkeypatch.setenv("VLLM_PORT", "9000")
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "5")  # the default: nothing was asked for
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert set(envs.unused_variables()) == {"VLLM_PORT"}
    assert "VLLM_PORT" not in envs.unknown_variables()


def test_every_name_of_the_interface_is_known():
    """The table of variables of the public interface."""
    for name in [
        "VLLM_HOST_IP",
        "VLLM_PORT",
        "VLLM_RPC_BASE_PATH",
        "VLLM_CONFIG_ROOT",
        "VLLM_NO_USAGE_STATS",
        "VLLM_DO_NOT_TRACK",
        "VLLM_LOGGING_COLOR",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_IMAGE_FETCH_TIMEOUT",
        "VLLM_VIDEO_FETCH_TIMEOUT",
        "VLLM_AUDIO_FETCH_TIMEOUT",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_DP_RANK",
        "VLLM_DP_SIZE",
        "VLLM_DP_MASTER_IP",
        "VLLM_DP_MASTER_PORT",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT",
        "VLLM_BATCH_INVARIANT",
        "VLLM_DISABLE_COMPILE_CACHE",
        "VLLM_ENABLE_RESPONSES_API_STORE",
        "VLLM_USE_MODELSCOPE",
    ]:
        assert name in envs.VARIABLES
