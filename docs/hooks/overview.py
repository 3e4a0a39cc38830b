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
    """The reference's first page with its tables."""
    if MARK not in markdown:
        return markdown
    wanted = re.findall(r"reference/(\w+)\.md", str(config.nav))
    return markdown.replace(MARK, "\n\n".join(_section(name) for name in wanted if name != "index"))


def _section(name: str) -> str:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    title = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    lines = [f"## [{title[1]}]({name}.md)", "", "| name | what it is |", "| --- | --- |"]
    return "\n".join(lines + [_line(path, obj) for path, obj in documented(text)])


def documented(text: str) -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    """(path, object) of everything that a page of the reference documents, modules by members."""
    for path, listed in DIRECTIVE.findall(text):
        found = _package()[path.removeprefix("rigidities.")]
        if not found.is_module:
            yield path, found
            continue
        for name, member in found.members.items():
            if name in listed.split(", ") if listed else _is_public(found, member):
                yield f"{path}.{name}", member


def _is_public(module: griffe.Object | griffe.Alias, member: griffe.Object | griffe.Alias) -> bool:
    own = module.exports is not None or not member.is_alias
    return member.is_public and own and not member.is_attribute and not member.is_module


@cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("rigidities", search_paths=[ROOT / "src"])


def _line(path: str, found: griffe.Object | griffe.Alias) -> str:
    short = re.sub(r"\.(\w+)\.\1$", r".\1", path.removeprefix("rigidities."))  # file and function
    first = found.docstring.value.partition("\n")[0] if found.docstring else ""
    return f"| [`{short}`][{path}] | {first.replace('|', chr(92) + '|')} |"
