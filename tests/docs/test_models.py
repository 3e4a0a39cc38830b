"""The page "Does my model work?": its blocks run, and its table is that of the models tried."""

import re

import pytest

from tests.docs.test_docs import DOCS, blocks
from tests.foreign import table, zoo
from tests.support import layer_lines


@pytest.mark.thorough
def test_the_blocks_run(plain_torch) -> None:
    printed: list[str] = []
    namespace: dict[str, object] = {
        "print": lambda *words: printed.append(" ".join(map(str, words)))
    }
    code = [text for language, _, text in blocks(DOCS / "models.md") if language == "python"]
    assert len(code) >= 5
    for text in code:
        exec(compile(text, "models.md", "exec"), namespace)
    shown = re.findall(r"print\(.+\)  # (.+)", "".join(code))
    assert printed == shown != []


def test_the_table_has_the_line_of_every_model_and_none_is_far_off() -> None:
    lines = table.lines()
    assert [line for line, _ in lines] == [one.line for one in zoo.SPECIMENS]
    assert max(deviation for _, deviation in lines) <= 1e-5


def test_pages_count_models_and_libraries_as_the_table_does() -> None:
    packages = {one.package for one in zoo.SPECIMENS}
    for page in ("start.md", "promises.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        assert f"{len(zoo.SPECIMENS)} models of {len(packages)} libraries" in text
        assert "](models.md)" in text


def test_the_models_are_of_the_libraries_promised() -> None:
    promised = (
        "transformers torch_geometric timm mace-torch schnetpack chemprop rtdl_revisiting_models "
        "neuraloperator pytorch-forecasting peft lightning skorch"
    )
    assert set(promised.split()) <= {one.package for one in zoo.SPECIMENS}


def test_the_table_of_layers_is_that_of_the_models_tried() -> None:
    """`python -m tests.support.layer_lines` prints it."""
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    between = page.partition(layer_lines.BEGIN)[2].partition(layer_lines.END)[0]
    assert between.strip() == layer_lines.table()
