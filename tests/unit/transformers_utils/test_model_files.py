import json

import pytest

from tests.helpers.gguf_files import llama_metadata, write_gguf
from tests.helpers.model_folders import write_model_folder
from vllm.transformers_utils.config import (
    ModelSource,
    find_gguf_file,
    find_model_file,
    get_config,
    get_generation_config,
)


def test_folder_with_config(tmp_path):
    folder = write_model_folder(tmp_path / "m", hidden_size=96)
    assert get_config(ModelSource(folder)).hidden_size == 96
    assert find_model_file(ModelSource(folder), "nothing.json") is None
    assert get_generation_config(ModelSource(folder)) == {}


def test_generation_config_of_a_folder(tmp_path):
    folder = write_model_folder(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert get_generation_config(ModelSource(folder)) == {"temperature": 0.6}


def test_gguf_file_and_folder(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", llama_metadata(), {})
    assert get_config(ModelSource(str(path))).gguf_file == str(path)
    assert get_config(ModelSource(str(tmp_path))).hidden_size == 32
    assert find_model_file(ModelSource(str(path)), "generation_config.json") is None
    write_gguf(tmp_path / "b.gguf", llama_metadata(), {})
    with pytest.raises(ValueError, match=r"2 GGUF files.*a\.gguf, b\.gguf"):
        find_gguf_file(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "JSON object, not list")]
)
def test_broken_config_is_refused_naming_the_file(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        get_config(ModelSource(str(tmp_path)))


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        get_config(ModelSource(str(tmp_path)))


@pytest.mark.parametrize("name", ["no-such/model", "/no/such/folder", "a/b/c"])
def test_unknown_model_is_refused_naming_it(name):
    with pytest.raises(ValueError, match=f"Model '{name}' is neither a local folder"):
        get_config(ModelSource(name))
    assert get_generation_config(ModelSource(name)) == {}


def test_a_cached_repository_is_read_without_network(tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"hidden_size": 5}')
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert get_config(ModelSource("org/name", cache_dir=str(tmp_path))).hidden_size == 5
