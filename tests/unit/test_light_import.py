"""Starting a program must not load torch or a model library: help and errors have to come at once."""

import json
import subprocess
import sys

import pytest

CHECK = "import sys, json; sys.stdout.write(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"


def heavy_modules_after(statement):
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{CHECK}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "statement",
    [
        "import vllm",
        "import vllm; vllm.SamplingParams; vllm.EngineArgs; vllm.RequestOutput; vllm.TokensPrompt",
        "from vllm.config import VllmConfig; VllmConfig()",
        "from vllm.engine.arg_utils import EngineArgs",
    ],
)
def test_no_heavy_module_is_loaded(statement):
    assert heavy_modules_after(statement) == []
