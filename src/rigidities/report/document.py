"""The page around the content: one HTML file that asks the network for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .._version import __version__
from ..data.storage import write_over
from ..notices import extra
from .figures import Figure
from .markup import Markup, embedded, joined, tag

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


def page(
    title: str,
    content: Markup,
    figures: Mapping[str, Figure],
    hovers: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """The whole page, with plots by the identifier of their place and hover texts they share."""
    drawing = []
    if figures:
        script = _plotly().replace("</script", "<\\/script")  # which would end the element
        silent = tag("noscript", tag("p", "The plots need JavaScript."))
        drawing = [silent, tag("script", Markup(script))]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(_asset("page.css"))),
    )
    body = tag(
        "body",
        tag("main", content),
        tag("footer", f"Made with rigidities {__version__}."),
        *drawing,
        embedded({name: _plain(figure) for name, figure in figures.items()}, "figures"),
        embedded(dict(hovers or {}), "hovers"),
        tag("script", Markup(_asset("page.js"))),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def place(name: str, figure: Figure, *, controls: bool = True) -> Markup:
    """Where a plot will be drawn, with its heading, its choices and how to read it."""
    caption = [tag("figcaption", figure.caption)] if figure.caption else []
    style = f"height:{figure.height}px"
    plot = tag("div", id=name, class_="plot", role="img", aria_label=figure.label, style=style)
    found = []  # a list of choices for its traces, buttons for its axes
    if controls and len(figure.traces) > 1:
        found.append(chooser([name], figure.choice, list(figure.traces), figure.chosen))
    if controls and len(figure.layouts) > 1:
        found.append(_buttons(name, list(figure.layouts)))
    choices = tag("div", *found, class_="controls") if found else Markup()
    return tag("figure", tag("h3", figure.title), choices, plot, *caption)


def chooser(names: Sequence[str], label: str, options: Sequence[str], chosen: str) -> Markup:
    """A list of choices of the traces of one or more plots."""
    entries = (tag("option", o, value=o, selected=o == chosen) for o in options)
    box = tag("select", *entries, data_choice="trace", data_figures=" ".join(names))
    return tag("label", f"{label} ", box)


def write_page(path: str | os.PathLike[str], text: str) -> Path:
    """Write a page so that a crash leaves either the old one or the new one.

    Raises:
        OSError: there is no such folder, or it cannot be written.
    """
    path = checked_place(path)
    try:
        write_over(path, text.encode())
    except OSError as error:
        raise type(error)(
            f"Cannot write into the folder {path.parent} ({error.strerror or error}). "
            "Choose another place for the report."
        ) from error
    return path


def checked_place(path: str | os.PathLike[str]) -> Path:
    """The path, where a file can be put there."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path.parent} for {path.name}. Make it, or choose another place."
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Name a file in it.")
    if path.exists() and not path.is_file():
        raise FileExistsError(
            f"{path} is a device or a pipe, which would be replaced. Name a file for it."
        )
    return path


def require_plotly() -> Any:
    """Plotly's module for pages; called early, to say what is missing."""
    try:
        from plotly import offline
    except ImportError as error:
        raise ModuleNotFoundError(f"A report needs plotly: {extra('report')}.") from error
    return offline


def _plotly() -> str:
    return str(require_plotly().get_plotlyjs())


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _plain(figure: Figure) -> dict[str, Any]:
    drawn = {"traces": dict(figure.traces), "layouts": dict(figure.layouts)}
    chosen = figure.chosen or next(iter(figure.traces))
    return {**drawn, "chosen": chosen, "height": figure.height}


def _buttons(name: str, options: Sequence[str]) -> Markup:
    one = {"type": "radio", "name": f"{name}-axes", "data_choice": "layout", "data_figures": name}
    labels = (
        tag("label", tag("input", value=option, checked=k == 0, **one), option)
        for k, option in enumerate(options)
    )
    return tag("fieldset", tag("legend", "Axes"), joined(labels))
