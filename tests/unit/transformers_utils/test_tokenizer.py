"""Opening tokenizers and what they answer."""

import itertools
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.tiny_tokenizers import make_tokenizer, save_tokenizer
from vllm.tokenizers import TokenizerLike, get_tokenizer
from vllm.transformers_utils.tokenizer import SHORT_TEXT_MAX, FastTokenizer, characters_at_most


@pytest.fixture(params=["byte_level", "byte_fallback"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tokenizer(request.param, tmp_path / "model", chat_template="{{ messages }}")


def test_folder_opens_without_transformers(folder: Path) -> None:
    loaded = set(sys.modules)
    tokenizer = get_tokenizer(folder)
    assert isinstance(tokenizer, FastTokenizer)
    assert isinstance(tokenizer, TokenizerLike)
    assert not [name for name in set(sys.modules) - loaded if name.split(".")[0] in ("transformers", "torch")]


def test_text_round_trip_and_special_tokens(folder: Path) -> None:
    tokenizer = get_tokenizer(str(folder))
    ids = tokenizer.encode("hello Köln 你", add_special_tokens=False)
    assert tokenizer.decode(ids) == "hello Köln 你"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "</s>"
    assert tokenizer.decode([tokenizer.bos_token_id, *ids], skip_special_tokens=True) == "hello Köln 你"
    assert set(tokenizer.all_special_tokens) == {"<s>", "</s>", "<pad>"}
    assert tokenizer("hello").input_ids == tokenizer.encode("hello")
    assert len(tokenizer) == len(tokenizer.get_vocab()) == tokenizer.max_token_id + 1


def test_ids_outside_the_vocabulary_decode_to_nothing(folder: Path) -> None:
    tokenizer = get_tokenizer(folder)
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.decode([*ids, 10**6]) == tokenizer.decode(ids)
    assert tokenizer.convert_ids_to_tokens([10**6]) == [None]


@pytest.mark.parametrize(("flag", "expected"), [(True, 1), (False, 0), (None, 0)])
def test_add_bos_token_is_obeyed(tmp_path: Path, flag: bool | None, expected: int) -> None:
    tokenizer = get_tokenizer(save_tokenizer("byte_level", tmp_path, add_bos_token=flag))
    ids = tokenizer.encode("hello")
    assert ids.count(tokenizer.bos_token_id) == expected
    assert tokenizer.encode("hello", add_special_tokens=False).count(tokenizer.bos_token_id) == 0


def test_truncation_keeps_the_beginning(folder: Path) -> None:
    tokenizer = get_tokenizer(folder)
    assert (
        tokenizer.encode("hello world", truncation=True, max_length=3) == tokenizer.encode("hello world")[:3]
    )


def test_chat_template_comes_from_the_config_or_its_own_file(folder: Path) -> None:
    assert get_tokenizer(folder).chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("from a file")
    assert get_tokenizer(folder).get_chat_template() == "from a file"


def test_named_chat_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = get_tokenizer(save_tokenizer("byte_level", tmp_path, chat_template=templates))
    assert tokenizer.get_chat_template() == "D"
    assert tokenizer.get_chat_template(tools=[{}]) == "T"
    assert tokenizer.get_chat_template("tool_use") == "T"
    assert tokenizer.get_chat_template("{{ inline }}") == "{{ inline }}"


def test_special_tokens_map_may_hold_objects(tmp_path: Path) -> None:
    save_tokenizer("byte_level", tmp_path)
    config = {"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = get_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("/nowhere/at/all", "auto", "neither a directory nor"),
        ("model", "mistral", "must be one of"),
    ],
)
def test_errors_name_the_place(name: str, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_tokenizer(name, tokenizer_mode=mode)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        get_tokenizer(tmp_path)
    save_tokenizer("byte_level", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        get_tokenizer(tmp_path)


def test_decoding_agrees_with_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    ours = get_tokenizer(folder)
    for text in ("hello world", "Grüße 你好 😀", '{"a": [1]}'):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_one_tokenizer_is_opened_once_per_kind() -> None:
    assert make_tokenizer("byte_level") is make_tokenizer("byte_level")


def test_a_long_text_has_the_same_ids_and_lets_other_threads_run(folder: Path) -> None:
    tokenizer = get_tokenizer(folder)
    text = "hello Köln 你 </s> END " * (20 * SHORT_TEXT_MAX // 20)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    ids = tokenizer.encode(text)
    took = time.monotonic() - start
    done.set()
    thread.join()
    assert ids == tokenizer.backend_tokenizer.encode(text).ids
    silence = max(b - a for a, b in itertools.pairwise([start, *ticks]))
    assert silence < max(0.5 * took, 0.25)


def test_a_text_is_hopeless_only_if_its_tokens_cannot_be_few(tmp_path: Path) -> None:
    exact = get_tokenizer(save_tokenizer("byte_level", tmp_path / "a"))
    for text in ("hello " * 50, "你好世界" * 20, "</s>" * 30):
        assert len(text) <= characters_at_most(exact, len(exact.encode(text)))
    assert characters_at_most(get_tokenizer(save_tokenizer("byte_fallback", tmp_path / "b")), 10) is None
    assert characters_at_most(object(), 10) is None
