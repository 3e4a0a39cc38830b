"""One HTML file that makes no network requests.

`page` fills a Jinja template. Templates extend `templates/page.html`, which holds what every page
has: the style, the policy that forbids requests, plotly's script, the plots as JSON and the script
that draws them. Jinja escapes all text that is passed to a template, so that text from data is
never read as HTML.

`save` puts a page into a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from .._version import __version__
from ..data.storage import write_over
from ..notices import extra
from .figures import Plot

if TYPE_CHECKING:
    from jinja2 import Environment

_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


def page(
    template: str,
    *,
    title: str,
    plots: Mapping[str, Plot],
    hover_texts: Mapping[str, Sequence[str]] | None = None,
    template_package: str = __package__,
    **content: object,
) -> str:
    """Fill a template.

    Args:
        template: The template's name. It extends `page.html`.
        title: Title of the page.
        plots: All plots, by the identifier of the element that each is drawn in.
        hover_texts: Hover texts that plots share, by the name that their traces use.
        template_package: The package whose folder `templates` holds the template.
        **content: The other variables of the template.
    """
    require_extra()
    # Without plots a page carries no plotly, which is a million characters long.
    plotly_script = _plotly_script() if plots else ""
    return (
        _environment(template_package)
        .get_template(template)
        .render(
            title=title,
            figures={name: plot.plain() for name, plot in plots.items()},
            hovers=dict(hover_texts or {}),
            policy=_CONTENT_SECURITY_POLICY,
            style=_asset("page.css"),
            page_script=_asset("page.js"),
            plotly_script=plotly_script,
            version=__version__,
            **content,
        )
    )


@cache
def _environment(template_package: str) -> Environment:
    """Jinja with the templates of a package, or of this one where that package lacks them."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loaders = [PackageLoader(package) for package in (template_package, __package__)]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # The filter `tojson` escapes whatever could end the script that contains the JSON. Keys keep
    # their order, which is that of the choices, and NaN, which JSON does not have, is refused.
    environment.policies["json.dumps_kwargs"] = {
        "sort_keys": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    return environment


def require_extra() -> None:
    """Raise early if plotly or Jinja, which the extra `report` installs, is missing.

    Raises:
        ModuleNotFoundError: One of them is not installed.
    """
    try:
        import jinja2  # noqa: F401
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        package = (error.name or "plotly").partition(".")[0]
        raise ModuleNotFoundError(f"A report needs {package}: {extra('report')}.") from error


@cache
def _plotly_script() -> str:
    """Plotly's script with the traces that the plots use; see `plotly/README.md`.

    The Python package has a script with all traces, which would make a page of five megabytes.
    """
    import lzma

    packed = (files(__package__) / "plotly" / "plotly.min.js.xz").read_bytes()
    script = lzma.decompress(packed).decode()
    # Nothing may end the script element around it.
    return script.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    """The text of a file beside this module."""
    return (files(__package__) / name).read_text(encoding="utf-8")


# --- writing -----------------------------------------------------------------------------------


def save(path: str | os.PathLike[str], text: str) -> Path:
    """Write a page so that a crash leaves either the old one or the new one.

    Args:
        path: The file. Its folder must exist.
        text: The page.

    Returns:
        The file.

    Raises:
        OSError: There is no such folder, or it cannot be written.
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


def checked_place(path: str | os.PathLike[str], sources: Iterable[Path | None] = ()) -> Path:
    """The path, after a check that a file can be written there.

    Args:
        path: The file to write.
        sources: Files that the command reads, which it must not replace; None is skipped.

    Raises:
        OSError: There is no such folder, or the path is a folder, a device or a pipe.
        ValueError: The path is one of the files that the command reads.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path.parent} for {path.name}. Create it, or choose another place."
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Name a file in it.")
    if path.exists() and not path.is_file():
        raise FileExistsError(
            f"{path} is a device or a pipe, which the page would replace. Choose a file instead."
        )
    for source in sources:
        if source is not None and path.exists() and source.exists() and path.samefile(source):
            raise ValueError(
                f"--out {path} is a file that this command reads. Choose another place for the "
                "output."
            )
    return path
