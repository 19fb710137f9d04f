import pytest

from vllm.utils.registry import Registry, resolve_object


def test_resolves_both_spellings_and_nested_attributes():
    assert resolve_object("os.path:join") is resolve_object("os.path.join")
    assert resolve_object("vllm.config.cache:CacheConfig.DEFAULT_BLOCK_SIZE") == 16


@pytest.mark.parametrize("target", ["", "nodots", ":x", "os:"])
def test_malformed_target_is_refused(target):
    with pytest.raises(ValueError, match="Not an importable name"):
        resolve_object(target)


def test_lookup_registration_and_unknown_names():
    table = Registry("thing", {"join": "os.path:join"})
    table.register("sep", "os:sep")
    assert table.resolve("sep") == "/"
    assert "join" in table
    assert table.names() == sorted(table) == ["join", "sep"]
    with pytest.raises(ValueError, match="thing 'sep' is already registered"):
        table.register("sep", "os:sep")
    with pytest.raises(ValueError, match="Unknown thing 'x'; known: join, sep"):
        table.resolve("x")


def test_names_missing_from_the_table_are_looked_up_among_entry_points():
    table = Registry("command", {}, entry_point_group="console_scripts")
    assert callable(table.resolve("pytest"))
    with pytest.raises(ValueError, match="Unknown command"):
        table.resolve("no-such-command-here")
