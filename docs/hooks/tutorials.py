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
    _, *cells = CELL.split(script)
    names = {"__name__": "__main__"}
    pairs = zip(cells[::2], cells[1::2], strict=True)
    return "\n\n".join(_rendered(kind, body.strip("\n"), names) for kind, body in pairs) + "\n"


def _rendered(kind: str, body: str, names: dict[str, object]) -> str:
    if "[markdown]" in kind:
        return re.sub(r"^# ?", "", body, flags=re.MULTILINE)
    with redirect_stdout(StringIO()) as out:
        exec(compile(body, "a cell of a tutorial", "exec"), names)
    printed = out.getvalue().rstrip()
    return f"```python\n{body}\n```" + (PRINTED.format(printed) if printed else "")
