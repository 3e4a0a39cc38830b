"""Draw the pictures of the pages.

Run: python docs/pictures [name ...] [--out FOLDER]. Without names all pictures are drawn, and by
default into docs/images. Each module beside this one draws the pictures of some pages: its
`PICTURES` maps the name of a picture's file to the function that draws it.
"""

import argparse
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from drawing import STYLE

HERE = Path(__file__).parent
SHARED = ("__main__", "drawing")
"""Modules that draw no picture of their own."""


def pictures():
    """The function that draws each picture, by the name of the picture's file."""
    functions = {}
    for path in sorted(HERE.glob("*.py")):
        if path.stem not in SHARED:
            functions |= import_module(path.stem).PICTURES
    return functions


def draw(names, folder):
    """Draw some pictures into a folder, in double precision and all in one style."""
    mpl.use("Agg")
    functions = pictures()
    unknown = sorted(set(names) - set(functions))
    if unknown:
        raise SystemExit(f"No picture is called {unknown[0]!r}. There are: {', '.join(functions)}.")
    folder.mkdir(parents=True, exist_ok=True)
    usual_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for name in names or functions:
            with mpl.rc_context(STYLE):
                figure = functions[name]()
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                plt.close(figure)
    finally:
        torch.set_default_dtype(usual_dtype)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="docs/pictures", description="Draw the pages' pictures.")
    parser.add_argument("names", nargs="*", help="the pictures to draw (default: all)")
    parser.add_argument("--out", type=Path, default=HERE.parent / "images", metavar="FOLDER")
    options = parser.parse_args()
    draw(options.names, options.out)
