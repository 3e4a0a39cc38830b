"""Blocks of code on the pages of the documentation, which tests run in processes of their own."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def block(page: str, title: str) -> str:
    """The code of the one block of this title on a page."""
    pattern = rf'^```python title="{re.escape(title)}"\n(.*?)^```'
    text = (DOCS / page).read_text(encoding="utf-8")
    (code,) = re.findall(pattern, text, flags=re.DOTALL | re.MULTILINE)
    return code
