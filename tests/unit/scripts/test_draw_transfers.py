"""The pictures of a store and of a load in the documents: drawn from the script as it stands, readable, complete."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import draw_transfers
from vllm.v1.simple_kv_offload.transfer import TransferState

IMAGES = Path(__file__).parents[3] / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"
LETTERS_IN_A_BOX = 44


def test_the_documents_show_what_the_script_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_transfers, "IMAGES", tmp_path / "new")
    draw_transfers.main()
    for name in ("kv_store.svg", "kv_load.svg"):
        assert (tmp_path / "new" / name).read_text() == (IMAGES / name).read_text()


@pytest.mark.parametrize(
    ("name", "story"), [("kv_store", draw_transfers.STORE), ("kv_load", draw_transfers.LOAD)]
)
def test_a_picture_is_well_formed_and_says_every_line(
    name: str, story: tuple[draw_transfers.Event, ...]
) -> None:
    root = ElementTree.parse(IMAGES / f"{name}.svg").getroot()
    assert root.tag == f"{SVG}svg"
    said = [element.text for element in root.iter(f"{SVG}text")]
    for event in story:
        assert event.text in said
        assert event.detail in said
        assert len(event.detail) <= LETTERS_IN_A_BOX, "it would run over the edge of its box"
    states = {state for event in story for state in event.state.split(" | ") if state}
    assert states <= {state.name for state in TransferState}
    assert {"PLANNED", "SUBMITTED", "DONE"} <= states
