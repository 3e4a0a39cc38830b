"""The table "Does my model work?" of the documentation, written from a whole run."""

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.foreign.specimen import Specimen

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"
HEAD = """\
| library | model | the line | features | off by |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Row:
    """What was found for one specimen.

    Attributes:
        specimen: which.
        width: number of features.
        deviation: largest relative deviation of a variance from brute force.
    """

    specimen: Specimen
    width: int
    deviation: float

    def __str__(self) -> str:
        one = self.specimen
        where = f"{one.package} {version(one.package).partition('+')[0]}"
        return f"| {where} | {one.model} | `{one.line}` | {self.width} | {self.deviation:.0e} |\n"


def write(rows: list[Row]) -> None:
    """Put the rows between the marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    between = f"{BEGIN}\n\n{HEAD}{''.join(map(str, rows))}\n{END}"
    PAGE.write_text(
        re.sub(f"{BEGIN}.*{END}", lambda _: between, text, flags=re.DOTALL), encoding="utf-8"
    )


def lines() -> list[tuple[str, float]]:
    """The lines of the page's table, each with its deviation."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^\|[^|]+\|[^|]+\| `([^|]+)` \|[^|]+\| (\S+) \|$", text, re.M)
    return [(line, float(deviation)) for line, deviation in found]
