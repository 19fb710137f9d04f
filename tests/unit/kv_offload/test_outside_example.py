"""The spec from outside in docs/serving-with-offload.md, run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.offload_rig import Rig, full, mamba, prompt, window
from vllm.config import KVTransferConfig

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_keeps_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    text = (ROOT / "docs/serving-with-offload.md").read_text()
    found = re.search(r'```python\n("""folder_spec.py""".*?)```', text, re.DOTALL)
    assert found is not None
    module = f"folder_spec_{ranks}"
    (tmp_path / f"{module}.py").write_text(found.group(1))
    monkeypatch.syspath_prepend(tmp_path)
    extra = {"spec_name": "FolderSpec", "spec_module_path": module, "folder": str(tmp_path / "kv")}
    config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute",
    )
    rig = Rig([full(), window(), mamba()], connector_config=config, held=False)
    for seed in (1, 2):
        rig.generate(prompt(22, seed))
    while rig.manager.has_pending_work():
        rig.step()
    rig.evict_device()
    assert [rig.generate(prompt(22, seed)).num_cached_tokens for seed in (1, 2)] == [20, 20]
    files = list((tmp_path / "kv/rank0").iterdir())
    assert files
    # What went wrong below is computed instead.
    while rig.manager.has_pending_work():
        rig.step()
    rig.evict_device()
    for file in files:
        file.unlink()
    assert rig.generate(prompt(22, 1)).num_cached_tokens == 0
    rig.connector.reset_cache()
    rig.run()
    rig.evict_device()
    assert rig.generate(prompt(22, 2)).num_cached_tokens == 0
    while rig.manager.has_pending_work():
        rig.step()
    rig.assert_at_rest()
    rig.close()
    rig.connector.shutdown()
