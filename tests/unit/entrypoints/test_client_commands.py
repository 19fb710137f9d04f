"""`vllm chat`, `complete`, `bench serve` and `run-batch` against a real HTTP server round a scripted engine."""

import asyncio
import json

import httpx
import pytest

from tests.helpers.http_app import App, running, says
from vllm.entrypoints.cli import bench, bench_load, client, main, run_batch
from vllm.entrypoints.openai.api_server import build_state


@pytest.fixture
def app(tmp_path):
    return App(tmp_path, says("Hel", "lo"))


def test_chat_once_and_in_a_loop(app, capsys, monkeypatch):
    lines = iter(["first", "", "second"])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    with running(app) as url:
        assert main.main(["chat", "--url", f"{url}/v1", "-q", "hi", "--stats", "--system-prompt", "be"]) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith("Hello\n")
        assert "pieces in" in captured.err
        assert app.call.prompt["prompt"] == "<system>be</system><user>hi</user><assistant>"
        assert main.main(["chat", "--url", f"{url}/v1", "--model-name", "other"]) == 0
    assert (
        app.call.prompt["prompt"]
        == "<user>first</user><assistant>Hello</assistant><user>second</user><assistant>"
    )


def test_complete(app, capsys):
    with running(app) as url:
        assert client.complete(["--url", f"{url}/v1", "-q", "hi", "--max-tokens", "3", "--stats"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert (app.call.prompt["prompt"], app.call.params.max_tokens) == ("hi", 3)


def test_errors_of_the_server_are_shown(app, capsys, tmp_path, monkeypatch):
    with running(app) as url:
        assert main.main(["complete", "--url", f"{url}/v1", "--model-name", "nope", "-q", "x"]) == 1
        assert "404: The model `nope` does not exist." in capsys.readouterr().err
        assert main.main(["chat", "--url", f"{url}/nowhere", "-q", "x"]) == 1
        assert "404" in capsys.readouterr().err
    nobody = ["--url", "http://127.0.0.1:9/v1", "-q", "x"]
    assert main.main(["chat", *nobody]) == 1
    assert "no server answers" in capsys.readouterr().err
    assert main.main(["chat", "--model-name", "m", *nobody]) == 1
    assert "no answer from" in capsys.readouterr().err
    failing = App(tmp_path / "f", says("a", finish="error", stop_reason="broken"))
    with running(failing) as url:
        assert main.main(["complete", "--url", f"{url}/v1", "-q", "x"]) == 1
        assert "broken" in capsys.readouterr().err
    locked = App(tmp_path / "l", says("a"), ["--api-key", "k"])
    with running(locked) as url:
        assert main.main(["complete", "--url", f"{url}/v1", "-q", "x"]) == 1
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        assert main.main(["complete", "--url", f"{url}/v1", "-q", "x"]) == 0


# --- benchmark of a server ----------------------------------------------------------------------------------------


def test_bench_serve(app, capsys, tmp_path):
    path = tmp_path / "out.json"
    flags = [
        "--num-prompts",
        "5",
        "--random-input-len",
        "8",
        "--random-prefix-len",
        "4",
        "--random-output-len",
        "2",
        "--output-json",
        str(path),
    ]
    with running(app) as url:
        assert (
            main.main(
                [
                    "bench",
                    "serve",
                    "--base-url",
                    url,
                    *flags,
                    "--max-concurrency",
                    "2",
                    "--request-rate",
                    "1000",
                ]
            )
            == 0
        )
    figures = json.loads(path.read_text())
    assert (figures["completed"], figures["failed"]) == (5, 0)
    assert figures["mean_ttft_ms"] > 0
    assert "output_tokens_per_s" in capsys.readouterr().out
    prompts = [call.prompt["prompt_token_ids"] for call in app.engine.calls]
    assert {len(prompt) for prompt in prompts} == {8}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1


def test_bench_serve_reports_failures(tmp_path, capsys):
    failing = App(tmp_path, says("a", finish="error", stop_reason="broken"))
    with running(failing) as url:
        assert bench.main(["serve", "--base-url", url, "--num-prompts", "2", "--random-input-len", "4"]) == 1
    assert "failed: " in capsys.readouterr().err
    assert main.main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 1


@pytest.mark.parametrize(
    ("command", "flag", "value", "message"),
    [
        ("serve", "num-prompts", "0", "at least 1, got 0"),
        ("serve", "random-input-len", "-1", "at least 1, got -1"),
        ("serve", "random-output-len", "0", "at least 1, got 0"),
        ("serve", "random-prefix-len", "129", "from 0 to the 128 tokens of a prompt, got 129"),
        ("serve", "max-concurrency", "0", "at least 1, got 0"),
        ("serve", "vocab-size", "3", "at least 4, got 3"),
        ("serve", "request-rate", "0", "greater than 0, got 0.0"),
        ("serve", "request-rate", "nan", "greater than 0, got nan"),
        ("throughput", "num-prompts", "0", "at least 1, got 0"),
        ("throughput", "prefix-len", "-1", "from 0 to the 32 tokens of a prompt, got -1"),
        ("latency", "num-iters", "0", "at least 1, got 0"),
        ("latency", "output-len", "0", "at least 1, got 0"),
    ],
)
def test_bench_names_the_flag_of_a_value_it_cannot_use(command, flag, value, message):
    with pytest.raises(ValueError, match=f"--{flag} must be {message}"):
        bench.main([command, f"--{flag}={value}"])


def test_bench_names(capsys):
    assert bench.main(["--help"]) == 0
    assert bench.main([]) == 2
    for name, words in (("sweep", "not offered"), ("dance", "is no measurement")):
        with pytest.raises(ValueError, match=words):
            bench.main([name])


def test_figures_of_a_load():
    result = bench_load.RequestResult([0.1, 0.2, 0.4], prompt_tokens=3, completion_tokens=3)
    assert (result.ttft_s, result.total_s, result.tpot_s) == (0.1, 0.4, pytest.approx(0.15))
    assert result.gaps_s == pytest.approx([0.1, 0.2])
    figures = bench_load.summary([result, bench_load.RequestResult(error="x")], 2.0)
    assert (
        figures["completed"],
        figures["failed"],
        figures["requests_per_s"],
        figures["total_tokens_per_s"],
    ) == (1, 1, 0.5, 3.0)
    assert bench_load.summary([], 1.0)["mean_ttft_ms"] == 0.0
    assert bench_load.percentile([3, 1, 2], 0.5) == 2
    assert bench_load.random_prompts(2, 4, 100, seed=1) == bench_load.random_prompts(2, 4, 100, seed=1)
    empty = bench_load.RequestResult()
    assert (empty.ttft_s, empty.total_s) == (0.0, 0.0)
    bench_load._take_line('data: {"error": {"message": "m"}}', 0.1, empty)
    assert empty.error == "m"


def test_connection_errors_are_results():
    async def go():
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as http:
            plan = bench_load.LoadPlan([[1]], 1, float("inf"), None, 0)
            return await bench_load.run_load(http, "m", plan)

    results, _ = asyncio.run(go())
    assert "ConnectError" in results[0].error


class FakeLLM:
    """Stands for the LLM class in benchmarks: counts what it is asked for."""

    def __init__(self):
        from types import SimpleNamespace

        self.model_config = SimpleNamespace(get_vocab_size=lambda: 50)
        self.batches = []

    @classmethod
    def from_engine_args(cls, args):
        made = cls()
        FakeLLM.last = made
        return made

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        return None

    def generate(self, prompts, params, use_tqdm):
        from types import SimpleNamespace

        self.batches.append(prompts)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * params.max_tokens)]) for _ in prompts
        ]


def test_benchmarks_in_process(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "resolve_object", lambda target: FakeLLM)
    path = tmp_path / "o.json"
    flags = ["--model", "m", "--input-len", "5", "--output-len", "3", "--output-json", str(path)]
    assert (
        bench.main(["latency", *flags, "--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "1"])
        == 0
    )
    assert len(FakeLLM.last.batches) == 4
    assert FakeLLM.last.batches[0] != FakeLLM.last.batches[1]
    assert "mean_latency_s" in json.loads(path.read_text())
    assert bench.main(["throughput", *flags, "--num-prompts", "4", "--prefix-len", "2"]) == 0
    figures = json.loads(path.read_text())
    assert figures["total_tokens_per_s"] == pytest.approx(figures["output_tokens_per_s"] * 32 / 12)
    assert "requests_per_s" in capsys.readouterr().out


# --- batches ------------------------------------------------------------------------------------------------------

LINES = [
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
    {
        "custom_id": "b",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}]},
    },
    {"custom_id": "c", "url": "/v1/embeddings", "body": {}},
    {"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}},
    {"custom_id": "e", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": "many"}},
    {"custom_id": "f", "url": "/v1/completions", "body": {"prompt": "x", "model": "nope"}},
]


async def test_batch_lines_are_answered_in_order(app):
    lines = run_batch.parse_lines("\n".join(json.dumps(line) for line in LINES) + "\n\n")
    answers = await run_batch.answer_all(lines, app.app.state.serving)
    assert [answer["custom_id"] for answer in answers] == list("abcdef")
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200, 400, 400, 400, 404]
    assert answers[0]["response"]["body"]["choices"][0]["text"] == "Hello"
    assert answers[1]["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    assert answers[0]["error"] is None
    assert "not offered" in answers[2]["error"]["message"]


async def test_a_defect_costs_its_own_line_only(app, monkeypatch):
    async def broken(request):
        raise ZeroDivisionError

    monkeypatch.setattr(app.app.state.serving.chat, "create_chat_completion", broken)
    lines = run_batch.parse_lines("\n".join(json.dumps(line) for line in LINES[:2]))
    answers = await run_batch.answer_all(lines, app.app.state.serving)
    assert [answer["response"]["status_code"] for answer in answers] == [200, 500]


def test_batch_files(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="cannot be read"):
        run_batch.read_text(str(tmp_path / "bytes"))
    with pytest.raises(ValueError, match="line 2"):
        run_batch.parse_lines(json.dumps(LINES[0]) + "\nnonsense\n")
    for place in (str(tmp_path / "none"), "http://127.0.0.1:9/in"):
        with pytest.raises(ValueError, match="cannot be read"):
            run_batch.read_text(place)
    for place in (str(tmp_path / "no" / "folder"), "http://127.0.0.1:9/out"):
        with pytest.raises(ValueError, match="cannot be written"):
            run_batch.write_text(place, "x")
    run_batch.write_text(str(tmp_path / "ok"), "text")
    assert run_batch.read_text(str(tmp_path / "ok")) == "text"


def test_run_batch_command(app, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text(json.dumps(LINES[0]))
    engine = app.engine
    engine.shutdown = lambda: engine.control.append(("shutdown",))
    monkeypatch.setattr(run_batch.AsyncLLM, "from_vllm_config", classmethod(lambda cls, config, **kw: engine))
    model = engine.vllm_config.model_config.model
    flags = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", model]
    assert main.main(["run-batch", *flags]) == 0
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    assert answer["response"]["body"]["choices"][0]["text"] == "Hello"
    assert engine.control == [("shutdown",)]
    assert callable(build_state)
