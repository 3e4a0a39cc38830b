"""Render the notebook-style scripts of ``examples/tutorials`` as pages ``tutorials/<name>``.

A script is in percent format: a line ``# %% [markdown]`` begins a cell of text in comments, a line
``# %%`` one of code. What stands before the first of them is left out. Scripts are run. Below a
cell of code stands what it printed, and then the figures of matplotlib that it left open.

A cell that draws ends with a comment that begins with ``# Picture:``. It says what is seen, and
becomes the alternative text of the picture.
"""

import re
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

from mkdocs.structure.files import File

SCRIPTS = Path(__file__).parents[2] / "examples" / "tutorials"
CELL = re.compile(r"^# %%(.*)\n", flags=re.MULTILINE)
ALTERNATIVE = re.compile(r"^# Picture: (.*(?:\n#.*)*)\Z", flags=re.MULTILINE)
PRINTED = """

``` {{ .text .printed title="one run" }}
{}
```"""
DRAWN = "\n\n![{}]({})"
SVG = {"svg.hashsalt": "rigidities", "savefig.dpi": 160}
"""Settings with which a figure gives the same file again, and points in it stay sharp."""


def on_files(files, config, **_):
    """Add a page for every script, and its pictures."""
    for path in sorted(SCRIPTS.glob("[!_]*.py")):
        text, pictures = rendered(path.read_text(encoding="utf-8"), path.stem)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=picture))
    return files


@cache  # a server renders all pages whenever one has changed
def rendered(script: str, stem: str) -> tuple[str, dict[str, str]]:
    """A script in percent format as the text of a page, and its pictures.

    Args:
        script: The script. It is run.
        stem: How the names of its pictures begin.

    Returns:
        The text in Markdown, and SVG pictures by the names that the text has for them.
    """
    # The text before the first cell, then kinds and bodies of cells in turn.
    _, *kinds_and_bodies = CELL.split(script)
    kinds = kinds_and_bodies[::2]
    bodies = kinds_and_bodies[1::2]
    namespace = {"__name__": "__main__"}  # all cells share it
    pictures: dict[str, str] = {}
    cells = []
    for kind, body in zip(kinds, bodies, strict=True):
        body = body.strip("\n")
        if "[markdown]" in kind:
            cells.append(re.sub(r"^# ?", "", body, flags=re.MULTILINE))
        else:
            cells.append(_run_cell(body, namespace, stem, pictures))
    return "\n\n".join(cells) + "\n", pictures


def _run_cell(body: str, namespace: dict[str, object], stem: str, pictures: dict[str, str]) -> str:
    """A cell of code as Markdown, with what it prints and draws; its pictures are added."""
    with redirect_stdout(StringIO()) as output:
        exec(compile(body, "a cell of a tutorial", "exec"), namespace)
    alternative = ALTERNATIVE.search(body)
    text = f"```python\n{ALTERNATIVE.sub('', body).rstrip()}\n```"
    printed = output.getvalue().rstrip()
    if printed:
        text += PRINTED.format(printed)
    figures = _open_figures()
    if bool(figures) != bool(alternative):
        raise ValueError(
            'A cell that leaves figures open ends with a comment "# Picture: what is seen", and '
            f"no other cell does; got {len(figures)} figures after\n{body}"
        )
    for figure in figures:
        name = f"{stem}-{len(pictures) + 1}.svg"
        pictures[name] = figure
        seen = re.sub(r"\s*\n# ?", " ", alternative[1])
        text += DRAWN.format(seen, name)
    return text


def _open_figures() -> list[str]:
    """The open figures of matplotlib as SVG; they are closed."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    figures = []
    for number in plt.get_fignums():
        buffer = StringIO()
        with mpl.rc_context(SVG):
            plt.figure(number).savefig(buffer, format="svg", metadata={"Date": None})
        figures.append(buffer.getvalue())
    plt.close("all")
    return figures
