"""Render the notebook-style scripts of ``examples/tutorials`` as pages ``tutorials/<name>``.

A script is in percent format: a line ``# %% [markdown]`` begins a cell of text in comments, a line
``# %%`` one of code. What stands before the first of them is left out.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

SCRIPTS = Path(__file__).parents[2] / "examples" / "tutorials"
CELL = re.compile(r"^# %%(.*)\n", flags=re.MULTILINE)


def on_config(config, **_):
    """Put the pages into the navigation, in place of its entry ``tutorials``."""
    config.nav = filled(config.nav, [f"tutorials/{path.stem}.md" for path in scripts()])
    return config


def on_files(files, config, **_):
    """Add a page for every script."""
    for path in scripts():
        text = markdown(path.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
    return files


def scripts() -> list[Path]:
    """The tutorials, in the order of their names."""
    return sorted(SCRIPTS.glob("[!_]*.py"))


def markdown(script: str) -> str:
    """A script in percent format as the text of a page."""
    _, *cells = CELL.split(script)
    pairs = zip(cells[::2], cells[1::2], strict=True)
    return "\n\n".join(_rendered(kind, body.strip("\n")) for kind, body in pairs) + "\n"


def filled(nav: list, pages: list[str]) -> list:
    """The navigation with `pages` for ``tutorials``, or without that entry if there are none."""
    found = []
    for item in nav:
        title, below = next(iter(item.items())) if isinstance(item, dict) else (None, item)
        if below == "tutorials":
            found += [{title: pages}] if pages else []
        else:
            found.append({title: filled(below, pages)} if isinstance(below, list) else item)
    return found


def _rendered(kind: str, body: str) -> str:
    if "[markdown]" in kind:
        return re.sub(r"^# ?", "", body, flags=re.MULTILINE)
    return f"```python\n{body}\n```"
