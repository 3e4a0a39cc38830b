"""Turn LaTeX into MathML while the site is built, so that pages load no script from elsewhere.

MathML does not wrap. So what ``\\qquad`` sets side by side may stand below one another on a phone,
and so may what ``\\quad`` sets side by side within one of these formulas. Browsers draw some of
what the converter writes unlike TeX: `REPAIRS` below.
"""

import html
import re
from itertools import cycle

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?:\(|\[)(?P<latex>.*?)\\(?:\)|\])</(?P=tag)>',
    flags=re.DOTALL,
)

WIDE_SPACE, SPACE = r"\\qquad(?![a-z])", r"\\quad(?![a-z])"
BARE_ALPHABET = re.compile(r"\\(mathcal|mathscr|mathbb|mathbf|mathfrak)\s+([A-Za-z])")
EVALUATED = re.compile(r"([^=]*)\\[bB]igg?r?\|(?=_)")
SIZED_PAIR = re.compile(r"\\[bB]igg?([lr])(?![a-z])")

ATOM = r"<m[ion][^>]*>[^<]*</m[ion]>"
ACCENTED = r"<mover[^>]*>(?:(?!</?mover).)*</mover>"
ROW = r"<mrow>(?:(?!</?mrow>).)*</mrow>"
NAME = "<mi>(?:log|exp|sin|cos|tan|sinh|cosh|tanh|det|erf)</mi>"
PRIME = "<mi>(&#x0203[234];)</mi>"
THIN_SPACE = '<mspace width="0.17em" />'
BAR = re.compile(r'<mo(?: stretchy="false")?>&#x0007C;</mo>')

REPAIRS = (
    # Two primes after a subscript are one double prime.
    (
        rf"<msup>(<msubsup>(?:{ATOM})(?:{ATOM}|{ROW}))<mi>&#x02032;</mi></msubsup>"
        r"<mi>&#x02032;</mi></msup>",
        r"\1<mi>&#x02033;</mi></msubsup>",
    ),
    # Fonts draw a prime raised and small already: as a superscript it would fly off.
    (rf"<msup>({ATOM}|{ACCENTED}){PRIME}</msup>", r"<mrow>\1<mo>\2</mo></mrow>"),
    (
        rf"<msubsup>({ATOM}|{ACCENTED})({ATOM}|{ROW}){PRIME}</msubsup>",
        r"<msub><mrow>\1<mo>\3</mo></mrow>\2</msub>",
    ),
    # "is distributed as" is a relation, with space on both sides.
    ("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>"),
    # No space to speak of at a slash.
    ("<mo>&#x0002F;</mo>", '<mo lspace="0.06em" rspace="0.06em">&#x0002F;</mo>'),
    # A minus after a bracket, a comma or a relation is a sign: no space after it.
    (
        r"(<mo[^>]*>(?:&#x00028;|\[|&#x0005B;|&#x0002C;|&#x0003D;|&#x02248;)</mo>)"
        r"<mo>&#x02212;</mo>",
        r'\1<mo form="prefix">&#x02212;</mo>',
    ),
    # The line above a mean is as long as what it covers: not every font has a line that grows.
    (
        r'<mover><mrow>((?:(?!</?mrow>).)*)</mrow><mo accent="true">&#x02015;</mo></mover>',
        r'<mrow class="overline">\1</mrow>',
    ),
    # A bracket that is not drawn needs no space.
    ('<mo stretchy="true" fence="true" form="prefix" />', ""),
    # Capital Greek letters are upright.
    (r"<mi>(&#x003(?:9[1-9A-F]|A[0-9]);)</mi>", r'<mi mathvariant="normal">\1</mi>'),
    # Space on both sides of a function's name, but none before a bracket.
    (rf"(?<!<msub>)(?<!<msup>)(?<!<msubsup>)({NAME})(?=<m(?!o))", rf"\1{THIN_SPACE}"),
    (rf"(?<!&#x027E8;)(</m(?!o)\w+>)({NAME})", rf"\1{THIN_SPACE}\2"),
)
DISPLAYED = (
    # What a minimum is taken over stands below the word.
    (
        rf"<msub>(<mo>(?:min|max|inf|sup|lim)</mo>)({ATOM}|{ROW})</msub>",
        r"<munder>\1\2</munder>",
    ),
)


def on_page_content(content: str, **_: object) -> str:
    """The page with every formula that arithmatex marked as MathML."""
    with_mathml = FORMULA.sub(_mathml, content)
    # A number stays on one line with its error.
    return with_mathml.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _mathml(match: re.Match[str]) -> str:
    """One formula as MathML: within a line, or on lines of its own."""
    latex = _stretched(html.unescape(match["latex"]).strip())
    if match["tag"] == "span":
        return _converted(latex)
    formulas = "".join(_displayed(formula) for formula in parts(latex, WIDE_SPACE))
    return f'<div class="formula">{formulas}</div>'


def _displayed(latex: str) -> str:
    """One of the formulas side by side; it may consist of several that belong together."""
    formulas = [_converted(formula, display="block") for formula in parts(latex, SPACE)]
    if len(formulas) == 1:
        return formulas[0]
    return f'<div class="together">{"".join(formulas)}</div>'


def _stretched(latex: str) -> str:
    """LaTeX whose pairs of large brackets are as high as what they enclose."""
    sides = SIZED_PAIR.findall(latex)
    if sides.count("l") == sides.count("r"):
        return SIZED_PAIR.sub(lambda side: {"l": r"\left", "r": r"\right"}[side[1]], latex)
    return latex


def parts(latex: str, space: str = WIDE_SPACE) -> list[str]:
    """The formulas that stand side by side, unless a bracket or an environment spans them."""
    formulas = re.split(space, latex)
    brackets = (("{", "}"), (r"\left", r"\right"), (r"\begin", r"\end"))
    for formula in formulas:
        for opening, closing in brackets:
            if formula.count(opening) != formula.count(closing):
                return [latex]
    return formulas


def _converted(latex: str, display: str = "inline") -> str:
    """LaTeX as MathML that browsers draw as TeX would."""
    # Browsers ignore `mathvariant="script"`. With braces the converter writes the letter's own
    # character instead: ℒ for \mathcal{L}.
    latex = BARE_ALPHABET.sub(r"\\\1{\2}", latex.strip())
    # "... evaluated at": the bar is as high as what it follows, back to the equals sign.
    latex = EVALUATED.sub(r"\\left. \1 \\right|", latex)
    mathml = convert(latex, display=display)
    repairs = REPAIRS
    if display == "block":
        repairs += DISPLAYED
    for pattern, repaired in repairs:
        mathml = re.sub(pattern, repaired, mathml)
    return _with_paired_bars(mathml)


def _with_paired_bars(mathml: str) -> str:
    """MathML whose single bars open and close in turn, so that |r| has no space inside."""
    if len(BAR.findall(mathml)) % 2:
        return mathml
    forms = cycle(("prefix", "postfix"))
    return BAR.sub(
        lambda _: f'<mo form="{next(forms)}" stretchy="false">&#x0007C;</mo>',
        mathml,
    )
