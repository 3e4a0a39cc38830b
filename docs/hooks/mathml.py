"""Turn LaTeX into MathML while the site is built, so that pages load no script from elsewhere.

What ``\\qquad`` sets side by side may stand below one another on a phone; MathML does not wrap.
"""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?:\(|\[)(?P<latex>.*?)\\(?:\)|\])</(?P=tag)>',
    flags=re.DOTALL,
)
PRIMED = re.compile(r"<msup>(<m[io][^>]*>[^<]*</m[io]>)<mi>(&#x0203[23];)</mi></msup>")


def on_page_content(content: str, **_: object) -> str:
    """The page with every formula that arithmatex marked as MathML."""
    with_mathml = FORMULA.sub(_mathml, content)
    # A number stays on one line with its error.
    return with_mathml.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _mathml(match: re.Match[str]) -> str:
    """One formula as MathML: within a line, or on lines of its own."""
    latex = html.unescape(match["latex"]).strip()
    if match["tag"] == "span":
        return _converted(latex)
    formulas = "".join(_converted(formula, display="block") for formula in parts(latex))
    return f'<div class="formula">{formulas}</div>'


def parts(latex: str) -> list[str]:
    """The formulas that stand side by side, unless a bracket or an environment spans them."""
    formulas = re.split(r"\\qquad", latex)
    brackets = (("{", "}"), (r"\left", r"\right"), (r"\begin", r"\end"))
    for formula in formulas:
        for opening, closing in brackets:
            if formula.count(opening) != formula.count(closing):
                return [latex]
    return formulas


def _converted(latex: str, display: str = "inline") -> str:
    """LaTeX as MathML."""
    # Fonts draw a prime raised and small already: as a superscript it would fly off.
    return PRIMED.sub(r"<mrow>\1<mo>\2</mo></mrow>", convert(latex.strip(), display=display))
