"""The quickstart notebook runs from top to bottom, and its two files agree."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbclient
import pytest
import tiny_models

COLAB = Path(__file__).parents[2] / "colab"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook after a run with models that fit in a few kilobytes."""
    folder = tmp_path_factory.mktemp("quickstart")
    tiny_models.write_target(folder / "target")
    for kind in ("dspark", "dflash"):
        tiny_models.write_drafter(folder / kind, kind)
    (folder / "words.jsonl").write_text('{"turns": ["six?"]}\n')
    settings = {
        "TARGET": folder / "target",
        "DRAFTERS": f"{folder / 'dspark'},{folder / 'dflash'}",
        "TASKS": folder / "words.jsonl",
        "PROMPTS": 1,
        "TOKENS": 12,
        "QUESTION": "two?",
    }
    notebook = jupytext.read(COLAB / "quickstart.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        for name, value in settings.items():
            patch.setenv(f"DSPARK_QUICKSTART_{name}", str(value))
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(COLAB)}}).execute()
    return notebook


def outputs(notebook, mime):
    return [
        output["data"][mime]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if mime in output.get("data", {})
    ]


def test_tokens_are_coloured_by_their_origin(executed):
    html = [h for h in outputs(executed, "text/html") if "class=" in h and "rounds" in h]
    assert len(html) == 2
    assert all("class='first'" in h and ("class='corrected'" in h or "class='bonus'" in h) for h in html)
    # Confidences come from DSpark alone.
    assert "<sub" in html[0] and "<sub" not in html[1]


def test_text_equals_plain_decoding(executed):
    printed = "".join(o.get("text", "") for cell in executed.cells for o in cell.get("outputs", []))
    assert printed.count("the same text") == 2 and "ANOTHER TEXT" not in printed


def test_tables_and_figure(executed):
    assert any("Conditional acceptance by position" in text for text in outputs(executed, "text/markdown"))
    assert outputs(executed, "image/png")


def test_both_files_hold_the_same_cells():
    """After a change: jupytext --to ipynb colab/quickstart.py."""
    script, notebook = (jupytext.read(COLAB / f"quickstart.{ending}") for ending in ("py", "ipynb"))
    assert [(c.cell_type, c.source) for c in script.cells] == [(c.cell_type, c.source) for c in notebook.cells]


def test_the_notebook_is_kept_without_outputs():
    notebook = jupytext.read(COLAB / "quickstart.ipynb")
    assert not any(cell.get("outputs") for cell in notebook.cells)
