"""`rigidities report`: every kind of file gives its page, every fault a line with the remedy."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rigidities as rg
from rigidities import cli, metrics
from tests.support.nets import trained
from tests.support.pages import Page

pytestmark = pytest.mark.usefixtures("short")

GOOD = "mean,std,target\n" + "".join(f"{k},{1 + k / 10},{k + (-1) ** k}\n" for k in range(40))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    return cli.main(["report", *arguments])


def page(path: str = "report.html") -> Page:
    return Page(Path(path).read_text(encoding="utf-8"))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("rigidities: ")
    assert caught.err.count("\n") == 1
    return caught.err


# --- predictions -------------------------------------------------------------------------------


def test_a_table_of_predictions_gives_a_page(here: Path, capsys: Any) -> None:
    Path("p.csv").write_text(GOOD)
    assert run("p.csv") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Do not trust these bars as they stand: they are far too wide."
    assert said[-1] == "Wrote report.html"
    found = page()
    assert found.row("RMSE")[1] == "1.00"
    assert "p.csv" in found.text
    assert found.embedded("hovers")["t0"][0].startswith("<b>row 1</b>")
    assert [path.name for path in sorted(here.iterdir())] == ["p.csv", "report.html"]


@pytest.mark.parametrize("summary", ['{"accuracy": 1}', "[1, 2]", "no JSON"])
@pytest.mark.parametrize("has_model", [False, True])
def test_predictions_beside_the_summary_of_another_program_are_judged_as_they_are(
    summary: str, has_model: bool, here: Path
) -> None:
    Path("predictions.csv").write_text(GOOD)
    Path("summary.json").write_text(summary)
    if has_model:
        Path("model.safetensors").write_bytes(b"of another program")
    assert run("predictions.csv") == 0
    assert "40 rows of target" in page().text


def test_columns_are_named_and_others_shown(here: Path) -> None:
    name = "<script>window.bad=1</script>"
    lines = [f"{k};{k + 1};0.5;mol{k}" for k in range(30)]
    Path("p.csv").write_text("\n".join([f"y;guess;bar;{name}", *lines]), encoding="utf-8-sig")
    arguments = ["--mean", "guess", "--std", "bar", "--target", "y", "--title", "Mine & yours"]
    assert run("p.csv", "--out", "other.html", *arguments) == 0
    found = page("other.html")
    assert "Mine & yours" in found.text
    assert name in found.text
    assert found.embedded("hovers")["t0"][3].endswith("&lt;/script&gt;: mol3")


def test_an_index_without_a_name_gets_one(here: Path) -> None:
    header, *lines = GOOD.splitlines()
    indexed = [f",{header}", *(f"{1000 + k},{line}" for k, line in enumerate(lines))]
    Path("P.CSV").write_text("\n".join(indexed))
    assert run("P.CSV") == 0
    assert page().embedded("hovers")["t0"][2].endswith("column 1: 1002")


def test_several_targets_are_several_columns(here: Path) -> None:
    lines = [f"{k},1,{k},{k},2,{k + 1}" for k in range(30)]
    Path("p.csv").write_text("\n".join(["a,sa,ta,b,sb,tb", *lines]))
    assert run("p.csv", "--mean", "a", "b", "--std", "sa", "sb", "--target", "ta", "tb") == 0
    assert page().row("tb")[1] == "1.00"


def split_table(**spoilt: str) -> str:
    """40 rows of which the last 20 are test rows; `spoilt` replaces cells of row 31."""
    lines = ["mean,std,target,split"]
    for row in range(1, 41):
        cells = {"mean": f"{row}", "std": "1", "target": f"{row + (-1) ** row}"}
        if row == 31:
            cells |= spoilt
        lines.append(",".join([*cells.values(), "train" if row <= 20 else "test"]))
    return "\n".join(lines)


def test_test_rows_of_a_table_keep_their_numbers_and_are_counted(here: Path, capsys: Any) -> None:
    Path("p.csv").write_text(split_table(target="1000"))
    assert run("p.csv") == 0
    selection = "The report judges 20 of the 40 rows: those with split = test."
    assert selection in capsys.readouterr().out
    found = page()
    assert selection in found.text
    hovers = found.embedded("hovers")["t0"]
    assert hovers[0].startswith("<b>row 21</b>")
    assert "row 31" in found.text  # its error is far outside
    assert "Row numbers are those of the table." in found.text


@pytest.mark.parametrize("spoilt", [{"target": "x"}, {"std": "0"}, {"std": "1e-200"}])
def test_errors_about_test_rows_name_the_row_of_the_file(
    spoilt: dict[str, str], here: Path, capsys: Any
) -> None:
    Path("p.csv").write_text(split_table(**spoilt))
    assert run("p.csv") == 2
    assert "in row 31" in said(capsys)


def test_a_table_of_test_rows_only_is_judged_without_a_word_on_them(here: Path, capsys) -> None:
    header, *lines = GOOD.splitlines()
    Path("p.csv").write_text("\n".join([f"{header},split", *(f"{line},test" for line in lines)]))
    assert run("p.csv") == 0
    assert "split = test" not in capsys.readouterr().out


BAD_TABLES = [
    ("", "p.csv is empty"),
    ("mean,std,target\n", "a header but no rows"),
    ("mean,sigma,target\n1,2,3\n", "the column 'std' in p.csv, which has 'mean', 'sigma'"),
    (GOOD + "1,nan,3\n", "in the column 'std' of p.csv, got 'nan' in row 41 (line 42)"),
    (GOOD + "one,2,3\n", "in the column 'mean' of p.csv, got 'one' in row 41"),
    (GOOD + "1,2,\n", "in the column 'target' of p.csv, got '' in row 41"),
    (GOOD + "\n\n1,2,x\n", "got 'x' in row 41 (line 44)"),
    (GOOD + "1,2\n", "Expected 3 entries in row 41 (line 42) of p.csv, got 2"),
    (GOOD + "1,0,3\n1,0,3\n", "Expected std > 0, got 0 in row 41 (and 1 more rows)"),
    (GOOD + "1,-2,3\n", "Expected std > 0, got -2 in row 41"),
    ("mean,mean,target\n1,2,3\n", "the column 'mean' twice"),
    (f'mean,std,target\n1,2,"{"x" * 200_000}"\n', "is not a CSV file"),
    (b"\xff\xfe\x00m\x00e", "is not a CSV file in UTF-8"),
]


@pytest.mark.parametrize(("content", "words"), BAD_TABLES)
def test_a_bad_file_is_explained(content: Any, words: str, here: Path, capsys) -> None:
    Path("p.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run("p.csv") == 2
    assert words in said(capsys)
    assert not Path("report.html").exists()


def test_fewer_rows_than_a_bin_leave_the_bins_out(here: Path) -> None:
    Path("p.csv").write_text("\n".join(GOOD.splitlines()[:9]))
    assert run("p.csv") == 0
    assert "There are only 8 rows" in page().text
    assert "t0-binned" not in page().figures


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.csv"], "There is no file none.csv"),
        (["nowhere"], "There is no file or folder nowhere"),
        (["p.txt"], "Expected predictions (.csv)"),
        (["p.csv", "--out", "none/r.html"], "There is no folder none for r.html"),
        (["p.csv", "--out", "."], "is a folder"),
        (["p.csv", "--model", "a:b"], "are for a .safetensors file"),
        (["p.csv", "--out", "p.csv"], "is a file that this command reads"),
        (["p.csv", "--out", "linked.html"], "is a file that this command reads"),
        (["p.csv", "--out", "/dev/null"], "is a device or a pipe"),
        (["p.json"], "python -m experiments.frame.html_page p.json"),
        (["p.safetensors", "--std", "y"], "--std is for predictions in a .csv file"),
        (["p.csv", "--mean", "mean", "mean"], "2 for --mean, 1 for --std, 1 for --target"),
    ],
)
def test_bad_arguments_are_explained(arguments: list[str], words: str, here: Path, capsys) -> None:
    for name in ("p.csv", "p.txt"):
        Path(name).write_text(GOOD)
    Path("linked.html").symlink_to("p.csv")
    assert run(*arguments) == 2
    assert words in said(capsys)
    assert Path("p.csv").read_text() == Path("linked.html").read_text() == GOOD


def test_a_folder_without_permission_and_a_missing_plotly_are_named(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    Path("p.csv").write_text(GOOD)
    with monkeypatch.context() as locked:
        locked.setattr("os.open", refuse)
        assert run("p.csv") == 1
    assert "Cannot write into the folder" in said(capsys)
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert run("p.csv") == 1
    assert 'pip install "rigidities[report]"' in said(capsys)


# --- a saved fit -------------------------------------------------------------------------------

MODULE = """
import torch
from tests.support.nets import trained

net = trained()

def build():
    return net.model

def other():
    model = trained().model
    torch.nn.init.zeros_(model[-1].weight)
    return model

class Odd(torch.nn.Sequential):
    def forward(self, x):
        return 1 / 0

def odd():
    model = trained().model
    model.__class__ = Odd
    return model

def fail():
    raise RuntimeError("no weights on this disk")

def nothing():
    return None

number = 3
"""


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("fit")
    net = trained()
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    uq.calibrate(net.valid, method=rg.Paper(noise="constant"))
    uq.save(folder / "uq.safetensors")
    x, y = (part.numpy() for part in net.test)
    np.savez(folder / "test.npz", x=x, y=y)
    np.savez(folder / "wide.npz", x=np.zeros((5, 7), dtype=np.float32), y=y[:5])
    np.savez(folder / "alone.npz", y=y)
    np.savez(folder / "unnamed.npz", a=x, b=y)
    header = "a,b,c,d,y"
    table = np.concatenate([x, y], 1)
    np.savetxt(folder / "test.csv", table, delimiter=",", header=header, comments="")
    (folder / "UPPER.CSV").write_text((folder / "test.csv").read_text())
    (folder / "my_module.py").write_text(MODULE)
    (folder / "broken.py").write_text("import nothing_of_this_name\n")
    (folder / "bad.npz").write_bytes(b"PK nonsense")
    return folder, (uq, net)


@pytest.fixture
def folder(fit: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(fit[0])
    return fit[0]


@pytest.mark.parametrize("data", ["test.npz", "test.csv", "UPPER.CSV"])
def test_a_saved_fit_and_its_model_give_a_page(data: str, fit: Any, folder: Path) -> None:
    uq, net = fit[1]
    assert run("uq.safetensors", "--model", "my_module:build", "--data", data) == 0
    x, y = net.test
    mean, std = (part.detach() for part in uq(x))
    found = page()
    assert float(found.row("NLLNeg")[1]) == pytest.approx(metrics.nll(mean, std, y), rel=5e-3)
    assert "Effective rank" in found.text
    table = data.lower().endswith(".csv")
    first = found.embedded("hovers")["t0"][0]
    assert ("c: " if table else "input 2: ") in first
    # counted as messages about the file count them
    assert first.startswith(f"<b>row {int(table)}</b>")
    assert f"Rows are counted from {int(table)}." in found.text
    assert str(folder) not in sys.path


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("my_module:other", "test.npz", "weights"),
        ("my_module", "test.npz", "Expected --model module:function"),
        ("absent_module:build", "test.npz", "Cannot import absent_module"),
        ("broken:build", "test.npz", "nothing_of_this_name"),
        ("my_module:absent", "test.npz", "my_module has no absent"),
        ("my_module:number", "test.npz", "not a function"),
        ("my_module:nothing", "test.npz", "to return a torch.nn.Module, got NoneType"),
        ("my_module:fail", "test.npz", "RuntimeError: no weights on this disk"),
        ("my_module:build", "none.npz", "There is no file none.npz"),
        ("my_module:build", "bad.npz", "damaged, or not an NPZ file"),
        ("my_module:build", "alone.npz", "contains only the target"),
        ("my_module:build", "unnamed.npz", "which has 'a', 'b'"),
        ("my_module:build", "wide.npz", "Cannot predict"),
        ("my_module:odd", "test.npz", "Cannot predict: ZeroDivisionError: division by zero"),
        ("my_module:build", "my_module.py", "Expected data in an .npz or .csv file"),
    ],
)
def test_a_fit_that_cannot_be_used_is_explained(model, data, words, folder, capsys) -> None:
    assert run("uq.safetensors", "--model", model, "--data", data, "--out", "new.html") == 2
    assert words in said(capsys)
    assert not Path("new.html").exists()


def test_the_data_of_a_fit_are_not_replaced(folder: Path, capsys: Any) -> None:
    before = Path("test.csv").read_bytes()
    arguments = ["--model", "my_module:build", "--data", "test.csv", "--out", "./test.csv"]
    assert run("uq.safetensors", *arguments) == 2
    assert "is a file that this command reads" in said(capsys)
    assert Path("test.csv").read_bytes() == before


def test_a_damaged_fit_and_one_without_its_model_are_explained(folder: Path, capsys: Any) -> None:
    assert run("uq.safetensors") == 2
    assert "Pass --model module:function" in said(capsys)
    Path("cut.safetensors").write_bytes(Path("uq.safetensors").read_bytes()[:200])
    assert run("cut.safetensors", "--model", "my_module:build", "--data", "test.npz") == 2
    assert "truncated, damaged" in said(capsys)


def test_the_target_of_the_data_can_be_named(folder: Path) -> None:
    arguments = ["--model", "my_module:build", "--data", "unnamed.npz", "--target", "b"]
    assert run("uq.safetensors", *arguments) == 0
    assert page().row("RMSE")


def test_the_help_names_the_command(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["report", "--help"])
    assert "--model" in capsys.readouterr().out
