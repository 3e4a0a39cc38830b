"""Take the picture of the HTML report: a page as a browser shows it.

Run: python docs/pictures/report_page.py [--out FILE]. It needs Chromium (`make browser` finds or
installs it), the extras `report` and `test`, and writes docs/images/report.webp by default.
"""

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PICTURES = {}
"""None that matplotlib draws."""

WIDTH = 1240
HEIGHT = 1000
SCALE = 1.4
"""Pixels of the picture per pixel of the page."""


def write_page(path):
    """The report on the cars of "Getting started"."""
    import torch
    from judging import cars, measured

    from rigidities import report

    torch.set_default_dtype(torch.float64)
    uq, x_test, y_test = cars()
    inputs = {"speed": x_test[:, 0].tolist(), "wet": x_test[:, 1].tolist()}
    reference = measured(300)[0]
    report.write(path, uq, x_test, y_test, names=["metres"], inputs=inputs, reference=reference)


def photograph(page_file, picture_file):
    """Show the page in a browser and save what is seen."""
    from PIL import Image

    sys.path.insert(0, str(ROOT))
    from tests.support import browser

    with tempfile.TemporaryDirectory() as folder, browser.launched() as running:
        viewport = {"width": WIDTH, "height": HEIGHT}
        context = running.new_context(viewport=viewport, device_scale_factor=SCALE)
        page = context.new_page()
        page.goto(page_file.as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg", timeout=browser.PATIENCE)
        page.wait_for_timeout(3000)  # plots are drawn one after another
        shot = Path(folder) / "page.png"
        page.screenshot(path=shot)
        Image.open(shot).convert("RGB").save(picture_file, quality=72, method=6)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Take the picture of the HTML report.")
    parser.add_argument("--out", type=Path, default=HERE.parent / "images" / "report.webp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report_file = Path(scratch) / "report.html"
        write_page(report_file)
        photograph(report_file, options.out)
