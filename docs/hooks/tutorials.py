"""Render the notebook-style scripts of ``examples/tutorials`` as pages ``tutorials/<name>``.

A script is in percent format: a line ``# %% [markdown]`` begins a cell of text in comments, a line
``# %%`` one of code. What stands before the first of them is left out. Scripts are run, and below a
cell of code stands what it printed.
"""

import re
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

from mkdocs.structure.files import File

SCRIPTS = Path(__file__).parents[2] / "examples" / "tutorials"
CELL = re.compile(r"^# %%(.*)\n", flags=re.MULTILINE)
PRINTED = """

``` {{ .text .printed title="one run" }}
{}
```"""


def on_files(files, config, **_):
    """Add a page for every script."""
    for path in sorted(SCRIPTS.glob("[!_]*.py")):
        text = markdown(path.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
    return files


@cache  # a server renders all pages whenever one has changed
def markdown(script: str) -> str:
    """A script in percent format as the text of a page, with what it prints."""
    # The text before the first cell, then kinds and bodies of cells in turn.
    _, *kinds_and_bodies = CELL.split(script)
    kinds = kinds_and_bodies[::2]
    bodies = kinds_and_bodies[1::2]
    namespace = {"__name__": "__main__"}  # all cells share it
    cells = [
        _rendered(kind, body.strip("\n"), namespace)
        for kind, body in zip(kinds, bodies, strict=True)
    ]
    return "\n\n".join(cells) + "\n"


def _rendered(kind: str, body: str, namespace: dict[str, object]) -> str:
    """A cell as Markdown; a cell of code is run, and what it prints stands below it."""
    if "[markdown]" in kind:
        return re.sub(r"^# ?", "", body, flags=re.MULTILINE)
    with redirect_stdout(StringIO()) as output:
        exec(compile(body, "a cell of a tutorial", "exec"), namespace)
    code = f"```python\n{body}\n```"
    printed = output.getvalue().rstrip()
    if printed:
        return code + PRINTED.format(printed)
    return code
