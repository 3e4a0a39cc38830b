"""One line per public name for the reference's first page, from the docstrings themselves.

Which names stand on which page is read from the pages, so that the overview cannot leave one out.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
MARK = "<!-- overview -->"
DIRECTIVE = re.compile(
    r"^::: (\S+)(?:\n    options:\n      members: \[(.+)\])?", flags=re.MULTILINE
)


def on_page_markdown(markdown, page, config, **_):
    """The reference's first page with its tables; other pages as they are."""
    if MARK not in markdown:
        return markdown
    names = re.findall(r"reference/(\w+)\.md", str(config.nav))
    sections = [_section(name) for name in names if name != "index"]
    return markdown.replace(MARK, "\n\n".join(sections))


def _section(name: str) -> str:
    """The heading and the table of one page of the reference."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    title = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    lines = [f"## [{title[1]}]({name}.md)", "", "| name | what it is |", "| --- | --- |"]
    for path, documented_object in documented(text):
        lines.append(_line(path, documented_object))
    return "\n".join(lines)


def documented(text: str) -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    """(path, object) of everything that a page of the reference documents, modules by members."""
    for path, listed_members in DIRECTIVE.findall(text):
        target = _package()[path.removeprefix("rigidities.")]
        if not target.is_module:
            yield path, target
            continue
        for name, member in target.members.items():
            if listed_members:
                is_documented = name in listed_members.split(", ")
            else:
                is_documented = _is_public(target, member)
            if is_documented:
                yield f"{path}.{name}", member


def _is_public(module: griffe.Object | griffe.Alias, member: griffe.Object | griffe.Alias) -> bool:
    """Whether a class or function is public; without `__all__`, imported ones are not."""
    belongs_here = module.exports is not None or not member.is_alias
    if not member.is_public or not belongs_here:
        return False
    # Only now: griffe cannot resolve what a module imports from elsewhere.
    return not member.is_attribute and not member.is_module


@cache
def _package() -> griffe.Object | griffe.Alias:
    """The library, read once and not imported."""
    return griffe.load("rigidities", search_paths=[ROOT / "src"])


def _line(path: str, documented_object: griffe.Object | griffe.Alias) -> str:
    """A row of a table: the name, and the first line of the docstring."""
    # A file and a function of the same name are named once.
    name = re.sub(r"\.(\w+)\.\1$", r".\1", path.removeprefix("rigidities."))
    summary = ""
    if documented_object.docstring:
        summary = documented_object.docstring.value.partition("\n")[0]
    escaped = summary.replace("|", "\\|")
    return f"| [`{name}`][{path}] | {escaped} |"
