"""What the documentation's hooks do to a page, without building the site."""

import importlib.util
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

HOOKS = Path(__file__).parents[2] / "docs" / "hooks"

SCRIPT = '''"""For readers of the script alone."""

# %% [markdown]
# # A first network
#
# Some text with a [link](../../docs/limits.md).

# %%
x = 1  # a comment stays


def f():
    return x


# %%
print(f"{f()} row\\nand {__name__}")

# %%
import matplotlib.pyplot as plt

print(plt.figure(figsize=(2, 1)).number)
_ = plt.figure(figsize=(2, 1))
# Picture: Nothing at all,
# in two figures.

# %% [markdown]
# The end.
'''

PAGE = """# A first network

Some text with a [link](../../docs/limits.md).

```python
x = 1  # a comment stays


def f():
    return x
```

```python
print(f"{f()} row\\nand {__name__}")
```

``` { .text .printed title="one run" }
1 row
and __main__
```

```python
import matplotlib.pyplot as plt

print(plt.figure(figsize=(2, 1)).number)
_ = plt.figure(figsize=(2, 1))
```

``` { .text .printed title="one run" }
1
```

![Nothing at all, in two figures.](first-1.svg)

![Nothing at all, in two figures.](first-2.svg)

The end.
"""


def hook(name: str) -> ModuleType:
    """A hook as mkdocs loads it: by its file, for it is no package."""
    spec = importlib.util.spec_from_file_location(f"hook_{name}", HOOKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_script_in_percent_format_becomes_a_page_with_what_it_prints_and_draws() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    page, pictures = hook("tutorials").rendered(SCRIPT, "first")
    assert page == PAGE
    assert list(pictures) == ["first-1.svg", "first-2.svg"]
    assert all("<svg" in picture for picture in pictures.values())
    assert pictures == hook("tutorials").rendered(SCRIPT, "first")[1]
    assert plt.get_fignums() == []


@pytest.mark.parametrize("cell", ["plt.figure()", "# Picture: One that nobody drew."])
def test_a_figure_without_words_and_words_without_a_figure_are_refused(cell: str) -> None:
    pytest.importorskip("matplotlib.pyplot")
    script = f"# %%\nimport matplotlib.pyplot as plt\n\n{cell}\n"
    with pytest.raises(ValueError, match="A cell that leaves figures open ends with a comment"):
        hook("tutorials").rendered(script, "first")


@pytest.mark.parametrize(
    ("link", "place", "here", "expected"),
    [
        ("limits.md", "docs/start.md", "start.md", "limits.md"),
        ("../limits.md", "docs/how_to/forces.md", "how_to/forces.md", "../limits.md"),
        ("../LICENSE", "docs/start.md", "start.md", "LICENSE"),
        ("../../LICENSE", "docs/how_to/forces.md", "how_to/forces.md", "../LICENSE"),
        ("../examples/force.py", "docs/start.md", "start.md", "examples/force.md"),
        ("docs/models.md", "CONTRIBUTING.md", "CONTRIBUTING.md", "models.md"),
        ("../../docs/limits.md", "examples/tutorials/a.py", "tutorials/a.md", "../limits.md"),
        ("nowhere.md", "docs/start.md", "start.md", "nowhere.md"),
    ],
)
def test_a_link_of_the_repository_leads_to_the_same_file_on_the_site(
    link: str, place: str, here: str, expected: str
) -> None:
    assert hook("repository").site_link(link, place, here) == expected


def test_formulas_side_by_side_may_wrap_unless_a_bracket_spans_them() -> None:
    parts = hook("mathml").parts
    assert parts(r"a = b, \qquad c = d") == ["a = b, ", " c = d"]
    assert parts(r"a \quad \text{if} \quad b, \qquad c") == [
        r"a \quad \text{if} \quad b, ",
        " c",
    ]
    assert len(parts(r"\left( a \qquad b \right)")) == 1
    shown = hook("mathml").on_page_content(
        r'<div class="arithmatex">\[ a = b, \qquad c = d \]</div> 1 ± 2'
    )
    assert shown.count("<math") == 2
    assert "1\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}2" in shown


def test_a_prime_stands_beside_its_letter_not_above_it() -> None:
    shown = hook("mathml").on_page_content('<span class="arithmatex">\\(x\'\\)</span>')
    assert "<mi>x</mi><mo>&#x02032;</mo>" in shown
    assert "msup" not in shown


def formula(latex: str, tag: str = "span") -> str:
    """What the hook makes of one formula, without the `math` element around it."""
    opening, closing = {"span": (r"\(", r"\)"), "div": (r"\[", r"\]")}[tag]
    shown = hook("mathml").on_page_content(
        f'<{tag} class="arithmatex">{opening}{latex}{closing}</{tag}>'
    )
    return re.search("<math[^>]*>(.*)</math>", shown)[1]


@pytest.mark.parametrize(
    ("latex", "expected"),
    [
        (r"\mathcal L_c", "<msub><mi>&#x02112;</mi><mi>c</mi></msub>"),
        (r"\mathbb E", "<mi>&#x1D53C;</mi>"),
        (r"\ell''_i", "<msub><mrow><mi>&#x02113;</mi><mo>&#x02033;</mo></mrow><mi>i</mi></msub>"),
        (r"\ell_i''", "<msub><mrow><mi>&#x02113;</mi><mo>&#x02033;</mo></mrow><mi>i</mi></msub>"),
        (r"\log u", '<mi>log</mi><mspace width="0.17em" /><mi>u</mi>'),
        (r"\log^2 u", "<msup><mi>log</mi><mn>2</mn></msup><mi>u</mi>"),
        (r"u \sim N", "<mi>u</mi><mo>&#x0223C;</mo><mi>N</mi>"),
        (r"\Sigma", '<mi mathvariant="normal">&#x003A3;</mi>'),
        (r"= -a", '<mo>&#x0003D;</mo><mo form="prefix">&#x02212;</mo><mi>a</mi>'),
        (r"\overline{r u}", '<mrow class="overline"><mi>r</mi><mi>u</mi></mrow>'),
    ],
)
def test_a_formula_is_written_so_that_browsers_draw_it_as_tex_does(
    latex: str, expected: str
) -> None:
    assert formula(latex) == f"<mrow>{expected}</mrow>"


@pytest.mark.parametrize("bar", [r"\Big|", r"\big|", r"\Bigr|"])
def test_a_bar_for_evaluated_at_is_as_high_as_what_it_follows(bar: str) -> None:
    shown = formula(rf"R = \frac{{a}}{{b}} {bar}_{{c}}", tag="div")
    assert shown == formula(r"R = \left. \frac{a}{b} \right|_{c}", tag="div")
    assert '<mo stretchy="true" fence="true" form="postfix">&#x0007C;</mo></mrow>' in shown


def test_bars_open_and_close_in_turn() -> None:
    forms = re.findall(r'<mo form="(\w+)" stretchy="false">&#x0007C;', formula(r"|a| - |b|^2"))
    assert forms == ["prefix", "postfix"] * 2
    assert "form=" not in formula(r"p(a | b)")


def test_large_brackets_are_as_high_as_what_they_enclose() -> None:
    assert formula(r"\Bigl( a \Bigr)^2") == formula(r"\left( a \right)^2")


def test_what_a_minimum_is_taken_over_stands_below_it_on_a_line_of_its_own() -> None:
    assert "<munder><mo>min</mo><mi>w</mi></munder>" in formula(r"\min_w f", tag="div")
    assert "<munder>" not in formula(r"\min_w f")


def test_an_entry_of_the_search_gets_keywords_parts_of_names_and_its_weight() -> None:
    complete = partial(hook("search").complete, keywords={"trees.md": "XGBoost"})
    page = {"location": "trees.html", "title": "Trees", "text": "<p>plain words</p>"}
    complete(page)
    assert page["keywords"] == "XGBoost"
    assert not {"boost", "parts"} & set(page)
    section = {"location": "trees.html#a", "title": "A", "text": "of GridSearchCV and trees"}
    complete(section)
    assert section["parts"] == "Grid Search CV"
    assert "keywords" not in section
    reference = {"location": "reference/trees.html", "title": "Trees", "text": ""}
    complete(reference)
    assert reference["boost"] < 1
    reference["boost"] = 3
    complete(reference)
    assert reference["boost"] == 3
