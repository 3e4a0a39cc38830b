"""Take the pictures of HTML reports: pages as a browser shows them.

Run: python docs/pictures/report_page.py. It needs Chromium (`make browser` finds or installs it)
and the extra `dev`. It writes docs/images/report.webp, a report on the cars of "Getting started",
and docs/images/tabular-report.webp, the report of `rigidities tabular` on a table of used cars.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMAGES = HERE.parent / "images"
PICTURES = {}
"""None that matplotlib draws."""

WIDTH = 1240
SCALE = 1.4
"""Pixels of the picture per pixel of the page."""


def write_report(path):
    """The report on the cars of "Getting started"."""
    import torch
    from judging import cars, measured

    from rigidities import report

    torch.set_default_dtype(torch.float64)
    uq, x_test, y_test = cars()
    inputs = {"speed": x_test[:, 0].tolist(), "wet": x_test[:, 1].tolist()}
    reference = measured(300)[0]
    report.write(path, uq, x_test, y_test, names=["metres"], inputs=inputs, reference=reference)


def write_table_report(folder):
    """The report that the command writes for the table of the page "A table, without Python".

    Returns:
        The path of the page.
    """
    table = folder / "cars.csv"
    make_table = ["-m", "benchmarks.car_prices", "--csv", str(table)]
    subprocess.run([sys.executable, *make_table], check=True, cwd=ROOT)
    learn = ["-m", "rigidities", "tabular", str(table), "--target", "price"]
    subprocess.run([sys.executable, *learn], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return folder / "rigidities-cars" / "report.html"


def photograph(page_file, picture_file, height):
    """Show the page in a browser and save what is seen."""
    from PIL import Image

    sys.path.insert(0, str(ROOT))
    from tests.support import browser

    with tempfile.TemporaryDirectory() as folder, browser.launched() as running:
        viewport = {"width": WIDTH, "height": height}
        context = running.new_context(viewport=viewport, device_scale_factor=SCALE)
        page = context.new_page()
        page.goto(page_file.as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg", timeout=browser.PATIENCE)
        page.wait_for_timeout(3000)  # plots are drawn one after another
        shot = Path(folder) / "page.png"
        page.screenshot(path=shot)
        Image.open(shot).convert("RGB").save(picture_file, quality=72, method=6)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        report_file = Path(scratch) / "report.html"
        write_report(report_file)
        photograph(report_file, IMAGES / "report.webp", height=1000)
        table_report_file = write_table_report(Path(scratch))
        photograph(table_report_file, IMAGES / "tabular-report.webp", height=900)
