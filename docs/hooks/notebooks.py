"""The scripts of ``examples/tutorials`` as Jupyter notebooks, in ``examples/notebooks``.

Run: python docs/hooks/notebooks.py. This writes one notebook for each script, without outputs, so
that a notebook changes only when its script does. On the site every tutorial offers its notebook
for download.
"""

import json
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = EXAMPLES / "tutorials"
NOTEBOOKS = EXAMPLES / "notebooks"
CELL = re.compile(r"^# %%(.*)\n", flags=re.MULTILINE)
OFFER = "[Download this tutorial as a Jupyter notebook]({}.ipynb)"


def notebook(script: str) -> str:
    """A script in percent format as the text of a notebook (nbformat 4.5)."""
    # The text before the first cell, then kinds and bodies of cells in turn.
    _, *kinds_and_bodies = CELL.split(script)
    kinds = kinds_and_bodies[::2]
    bodies = kinds_and_bodies[1::2]
    cells = []
    for number, (kind, body) in enumerate(zip(kinds, bodies, strict=True), start=1):
        cells.append(_cell(f"cell-{number}", kind, body.strip("\n")))
    content = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    # Jupyter itself writes files with this indent and with sorted keys.
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _cell(name: str, kind: str, body: str) -> dict[str, object]:
    """A cell of a notebook."""
    if "[markdown]" in kind:
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        # A link to another tutorial's script leads to its notebook, which lies in this folder.
        text = re.sub(r"\]\((\w+)\.py\)", r"](\1.ipynb)", text)
        return {
            "cell_type": "markdown",
            "id": name,
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {},
        "outputs": [],
        "source": body.splitlines(keepends=True),
    }


def write(folder: Path = NOTEBOOKS) -> list[Path]:
    """Write the notebooks of all scripts; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for script in sorted(SCRIPTS.glob("[!_]*.py")):
        path = folder / f"{script.stem}.ipynb"
        path.write_text(notebook(script.read_text(encoding="utf-8")), encoding="utf-8")
        paths.append(path)
    return paths


def on_files(files, config, **_):
    """Add the notebooks to the site, beside the pages of their tutorials."""
    from mkdocs.structure.files import File

    for script in sorted(SCRIPTS.glob("[!_]*.py")):
        content = notebook(script.read_text(encoding="utf-8"))
        place = f"tutorials/{script.stem}.ipynb"
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown, page, **_):
    """Offer the notebook below the title of a tutorial."""
    place = Path(page.file.src_uri)
    if place.parent.name != "tutorials":
        return markdown
    title, _, text = markdown.partition("\n")
    return f"{title}\n\n{OFFER.format(place.stem)}\n{text}"


if __name__ == "__main__":
    for written in write():
        print(written.relative_to(EXAMPLES.parent))
