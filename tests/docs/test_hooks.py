"""What the documentation's hooks do to a page, without building the site."""

import importlib.util
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
    plt = pytest.importorskip("matplotlib.pyplot")
    script = f"# %%\nimport matplotlib.pyplot as plt\n\n{cell}\n"
    with pytest.raises(ValueError, match="A cell that leaves figures open ends with a comment"):
        hook("tutorials").rendered(script, "first")
    plt.close("all")


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
