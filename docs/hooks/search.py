"""Let the search find what readers ask for.

The theme writes an index of all pages, and this hook completes it:

- A page is found by the words that readers use and the page does not: `extra.keywords` in
  mkdocs.yml.
- A name such as ``LastLayerRigidity`` is one word in the index, so that it is found in any case.
  Its parts, "Last Layer Rigidity", are added as words of their own.
- Guides come before the reference, and the reference before results and scripts.
"""

import json
import re
from pathlib import Path

BOOSTS = {
    "reference/": 0.5,
    "examples/": 0.2,
    "experiments/": 0.2,
    "benchmarks/": 0.2,
    "CHANGELOG": 0.1,
    "what_changed": 0.1,
    "release": 0.1,
    "CONTRIBUTING": 0.1,
}
"""How much a page counts whose address begins so, unless the page itself says."""

NAME = re.compile(r"\b[A-Za-z]+[a-z][A-Z]\w*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def on_post_build(config, **_):
    """Complete the index, before the theme's plugin for offline use copies it."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for entry in index["docs"]:
        complete(entry, config.extra["keywords"])
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def complete(entry: dict[str, object], keywords: dict[str, str]) -> None:
    """Add keywords, parts of names, and a boost to an entry: a page, or a section of one."""
    location = str(entry["location"])
    address, _, anchor = location.partition("#")
    page = address.removesuffix(".html")
    if f"{page}.md" in keywords and not anchor:
        entry["keywords"] = keywords[f"{page}.md"]
    parts = name_parts(f"{entry['title']} {entry['text']}")
    if parts:
        entry["parts"] = " ".join(parts)
    for beginning, boost in BOOSTS.items():
        if page.startswith(beginning):
            entry.setdefault("boost", boost)


def name_parts(text: str) -> list[str]:
    """The words that names in a text consist of, each once: ``GridSearchCV`` is Grid Search CV."""
    parts = dict.fromkeys(part for name in NAME.findall(text) for part in PART.findall(name))
    return [part for part in parts if len(part) > 1]
