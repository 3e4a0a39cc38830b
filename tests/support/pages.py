"""What a test wants to know of an HTML page: its text, its elements and the plots in it."""

import json
from html.parser import HTMLParser
from typing import Any

import pytest

VOID = {"meta", "input", "br"}


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave plotly's million characters out of the pages of a test."""
    monkeypatch.setattr("rigidities.report.document._plotly_script", lambda: "/* plotly.js v0 */")


class Page(HTMLParser):
    """A page taken apart; tags that do not match are refused."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attributes), ""))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif inside == "style":
            self.styles.append(data)
        else:
            self.words.append(data)
            if self.rows and ("td" in self.open or "th" in self.open):
                self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def embedded(self, name: str) -> Any:
        (found,) = [text for attributes, text in self.scripts if attributes.get("id") == name]
        return json.loads(found)

    @property
    def figures(self) -> dict[str, Any]:
        return dict(self.embedded("figures"))

    @property
    def running(self) -> list[str]:
        """Scripts that a browser runs."""
        return [text for attributes, text in self.scripts if "type" not in attributes]

    def row(self, first: str) -> list[str]:
        """The one row of a table whose first cell begins so."""
        (found,) = [row for row in self.rows if row[0].startswith(first)]
        return found
