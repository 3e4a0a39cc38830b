"""The notebooks of the tutorials: they are their scripts, cell by cell, and they run."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.docs.test_hooks import SCRIPT, hook

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def test_a_script_becomes_cells_of_text_and_of_code() -> None:
    content = json.loads(hook("notebooks").notebook(SCRIPT))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    sources = ["".join(cell["source"]) for cell in content["cells"]]
    assert sources == [
        "# A first network\n\nSome text with a [link](../../docs/limits.md).",
        "x = 1  # a comment stays\n\n\ndef f():\n    return x",
        'print(f"{f()} row\\nand {__name__}")',
        "import matplotlib.pyplot as plt\n\nprint(plt.figure(figsize=(2, 1)).number)\n"
        "_ = plt.figure(figsize=(2, 1))\n# Picture: Nothing at all,\n# in two figures.",
        "The end.",
    ]
    kinds = [cell["cell_type"] for cell in content["cells"]]
    assert kinds == ["markdown", "code", "code", "code", "markdown"]


def test_a_link_to_another_tutorial_leads_to_its_notebook() -> None:
    script = "# %% [markdown]\n# [Next](a_table.py), [limits](../../docs/limits.md)\n"
    (cell,) = json.loads(hook("notebooks").notebook(script))["cells"]
    assert "".join(cell["source"]) == "[Next](a_table.ipynb), [limits](../../docs/limits.md)"


def test_the_committed_notebooks_are_the_scripts_of_today(tmp_path) -> None:
    written = hook("notebooks").write(tmp_path)
    assert [path.name for path in written] == [path.name for path in NOTEBOOKS]
    for fresh, committed in zip(written, NOTEBOOKS, strict=True):
        assert fresh.read_text() == committed.read_text(encoding="utf-8"), (
            f"{committed.name} is not its script. Write the notebooks again: "
            "python docs/hooks/notebooks.py"
        )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_code_of_its_script_and_its_own_cell_names(path: Path) -> None:
    code = ["".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code"]
    script = (ROOT / "examples" / "tutorials" / f"{path.stem}.py").read_text(encoding="utf-8")
    # The script runs in test_tutorials.py, and so does the same code here.
    assert ast.dump(ast.parse("\n".join(code))) == ast.dump(ast.parse(script))
    names = [cell["id"] for cell in cells(path)]
    assert len(names) == len(set(names)) > 2
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).is_file()] == []


def test_a_tutorial_offers_its_notebook_below_the_title() -> None:
    notebooks = hook("notebooks")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/a_table.md"))
    shown = notebooks.on_page_markdown("# A table\n\nText.\n", page=page)
    offer = "[Download this tutorial as a Jupyter notebook](a_table.ipynb)"
    assert shown == f"# A table\n\n{offer}\n\nText.\n"
    other = SimpleNamespace(file=SimpleNamespace(src_uri="start.md"))
    assert notebooks.on_page_markdown("# Start\n", page=other) == "# Start\n"
    assert "docs/hooks/notebooks.py" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_for_jupyter(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_jupyter(path: Path, tmp_path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    content = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(content, timeout=300, resources=resources).execute()
    printed = [output for cell in content.cells for output in cell.get("outputs", [])]
    assert printed and all(output.output_type != "error" for output in printed)
