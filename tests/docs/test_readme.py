"""The README's Python blocks run, and print what it says they print."""

import re
from pathlib import Path

import pytest

from tests.docs.test_docs import BLOCK, assert_as_shown

# One worker, so that what the tests share runs once.
pytestmark = pytest.mark.xdist_group("readme")

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}.*?\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each block prints; blocks go on with the names of those that ran before.

    The first block shows the calls alone and runs last, with the model and rows of the others.
    """
    namespace: dict[str, object] = {}
    outputs: list[str] = []
    first, *others = blocks("python")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        for source in (*others, first):
            lines: list[str] = []
            namespace["print"] = lambda *words, lines=lines: lines.append(" ".join(map(str, words)))
            exec(compile(source, "README.md", "exec"), namespace)
            outputs.append("\n".join(lines))
    return [outputs[-1], *outputs[:-1]]


@pytest.mark.thorough
def test_every_python_block_runs(printed: list[str]) -> None:
    assert len(printed) == len(blocks("python")) >= 2
    assert printed[0].startswith("Calibrated on 200 validation rows")  # the report


def test_the_verbs_come_first() -> None:
    first = blocks("python")[0]
    for call in (".fit(x_train, y_train).calibrate(x_valid, y_valid)", "mean, std = uq(x)"):
        assert call in first
    assert README.index(first) < README.index("![Four panels")


def test_it_is_read_in_a_minute() -> None:
    assert len(README.splitlines()) <= 120


def test_blocks_print_the_numbers_shown(printed: list[str]) -> None:
    code, shown = iter(printed), BLOCK.findall(README)
    outputs = [next(code) if language == "python" else "" for language, _, _ in shown]
    texts = [i for i, (language, _, _) in enumerate(shown) if language == "text"]
    assert len(texts) == 1
    for i in texts:
        assert_as_shown(outputs[i - 1], shown[i][2], shown[i][1])


def test_pictures_and_files_it_names_exist() -> None:
    root = Path(__file__).parents[2]
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose)
    assert links
    assert [link for link in links if not (root / link).is_file()] == []


def test_the_two_commands_stand_on_it() -> None:
    commands = "\n".join(blocks("sh"))
    assert "make demo" in commands
    assert "make test" in commands
