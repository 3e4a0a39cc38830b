"""Bring what pages of the repository link to into the site: results, examples, how to contribute.

On the site these files lie where they lie in the repository, but for the folder ``docs``, whose
pages stand at the top. So a link that works in the repository is followed there, and written anew
for the site. Scripts become pages.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = ("experiments/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE")
FOLDERS = ("experiments/results", "benchmarks/results")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files, config, **_):
    """Add pages, numbers, pictures and scripts."""
    paths = [ROOT / name for name in PAGES]
    for folder in FOLDERS:
        paths += sorted((ROOT / folder).rglob("*.*"))
    for path in paths:
        place = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, place, abs_src_path=str(path)))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.stem}.md", content=_script(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Let links point to where files lie on the site."""
    here = page.file.src_uri
    is_from_outside = page.file.generated_by is not None
    if is_from_outside:
        place = repository_path(here)
    else:
        place = f"docs/{here}"
    return LINK.sub(lambda link: f"]({site_link(link[1], place, here)}", markdown)


def repository_path(here: str) -> str:
    """Where the file lies that a page outside ``docs`` was made of."""
    script = re.sub(r"\.md$", ".py", here)
    for name in (here, script, f"examples/{script}"):
        if (ROOT / name).is_file():
            return name
    return here


def site_link(link: str, place: str, here: str) -> str:
    """The link of a page that lies at `place` in the repository and at `here` on the site."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
    if not (ROOT / target).is_file():
        return link
    target = re.sub(r"^docs/", "", target)
    # Scripts are pages: examples/force.py is examples/force.md, examples/tutorials/a.py is
    # tutorials/a.md.
    target = re.sub(r"^(?:examples/)?((?:examples|tutorials)/\w+)\.py$", r"\1.md", target)
    return posixpath.relpath(target, posixpath.dirname(here) or ".")


def _script(path: Path) -> str:
    """A page that shows a script."""
    code = path.read_text(encoding="utf-8").rstrip()
    return f"# examples/{path.name}\n\n```python\n{code}\n```\n"
