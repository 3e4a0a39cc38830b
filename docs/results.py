"""Bring the committed results of the experiments into the site, under ``results/``.

Pages link to ``../experiments/results/...``, which works in the repository; on the site the same
files lie in ``results/...``.
"""

from pathlib import Path

from mkdocs.structure.files import File

RESULTS = Path(__file__).parents[1] / "experiments" / "results"


def on_files(files, config, **_):
    """Add pages, numbers and pictures of every experiment."""
    for path in sorted(RESULTS.rglob("*.*")):
        where = f"results/{path.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, where, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, **_):
    """Let links to the results point to where they lie on the site."""
    return markdown.replace("(../experiments/results/", "(results/")
