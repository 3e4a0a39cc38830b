"""Files: any damage is refused or changes nothing; what was there stays, whatever happens."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.data import storage
from rigidities.data.storage import Snapshot
from tests.support.refusals import refused
from tests.support.tampering import damage, flipped, rewrite

SNAPSHOT = Snapshot({"a": torch.arange(3.0), "b": torch.zeros(0)}, {"kind": "test"})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kept.safetensors"


# --- damage -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original():
    """A fit of about 30 kB, and what it predicts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 55), nn.Tanh(), nn.Linear(55, 1))
        x, y = torch.randn(300, 2), torch.randn(300, 1)
    uq = rg.LastLayerRigidity(model).fit((x[:200], y[:200]))
    uq.calibrate((x[200:], y[200:]), method=rg.Paper(noise="constant"))
    return uq, x


@pytest.fixture
def changed(original, path):
    """Whether a changed file is refused by its name; what loads must predict the same."""
    uq, x = original
    uq.save(path)
    expected = uq(x)[1]

    def attempt(content):
        path.write_bytes(content)
        try:
            again = rg.LastLayerRigidity.load(path, uq.model)
        except ValueError as error:
            return str(path) in str(error)
        assert torch.equal(again(x)[1], expected) and str(again.calibration_report) == str(
            uq.calibration_report
        )
        return False

    return attempt, path.read_bytes()


def some_bits(content, count):
    """So many of the header, evenly spaced, as many of the tensors, and as many drawn at random."""
    end = 8 * (8 + int.from_bytes(content[:8], "little"))
    drawn = torch.randint(8 * len(content), (count,), generator=torch.Generator().manual_seed(0))
    tensors = range(end, 8 * len(content), max(1, (8 * len(content) - end) // count))
    return [*range(0, end, max(1, end // count)), *tensors, *drawn.tolist()]


@pytest.mark.parametrize("count", [30, pytest.param(350, marks=pytest.mark.thorough)])
def test_a_flipped_bit_is_refused(changed, count):
    attempt, content = changed
    assert 25_000 < len(content) < 40_000
    assert not attempt(content)
    assert all(attempt(flipped(content, bit)) for bit in some_bits(content, count))


def some_lengths(content, count):
    """Each of the first bytes, those around the header's end, the last, and some in between."""
    end = 8 + int.from_bytes(content[:8], "little")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(content), (count,), generator=generator).tolist()
    return [*range(12), *range(end - 4, end + 12), *drawn, *range(len(content) - 12, len(content))]


def test_a_truncated_or_longer_file_is_refused(changed):
    attempt, content = changed
    assert all(attempt(content[:length]) for length in some_lengths(content, 100))
    assert all(attempt(content + b"\0" * more) for more in (1, 8, 600))


@pytest.mark.slow
def test_ten_thousand_flipped_bits_and_every_truncation_are_refused(changed):
    attempt, content = changed
    assert all(attempt(flipped(content, bit)) for bit in some_bits(content, 3_400))
    assert all(attempt(content[:end]) for end in range(len(content)))


def test_tensors_in_each_others_place_are_refused(path):
    two = {"a": torch.arange(3.0), "b": torch.arange(3.0, 6.0)}
    Snapshot(two, {"kind": "test"}).write(path)
    content = path.read_bytes()
    first, second = (two[name].numpy().tobytes() for name in "ab")
    assert content.endswith(first + second)
    path.write_bytes(content.removesuffix(first + second) + second + first)
    refused("kept.safetensors is damaged: .* checksum", storage.read, path)
    path.write_bytes(content.replace(b'"a":{', b'"c":{'))
    refused("kept.safetensors is damaged: it lacks the tensor 'a'", storage.read, path)
    path.write_bytes(content)
    assert torch.equal(storage.read(path)[0]["b"], two["b"])


def rewritten(path, **metadata):
    """The same tensors under other metadata."""
    tensors, _ = storage.read(path)
    path.write_bytes(storage.save(tensors, metadata={k: v for k, v in metadata.items() if v}))


def test_a_file_of_this_format_must_have_its_checksum(path):
    SNAPSHOT.write(path)
    tensors, header = storage.read(path)
    assert torch.equal(tensors["a"], torch.arange(3.0)) and header["kind"] == "test"
    text = json.dumps(header)
    for checksum in (None, "0" * 64):
        rewritten(path, rigidities=text, checksum=checksum)
        refused("kept.safetensors is damaged: .* checksum", storage.read, path)
        SNAPSHOT.write(path)


NOT_AS_LISTED = {
    "missing": (
        lambda tensors, header: tensors.pop("a"),
        r"lacks the tensor 'a', float32 \(3,\)\.",
    ),
    "too many": (
        lambda tensors, header: tensors.update(c=torch.ones(2)),
        "has a tensor 'c', which its header does not list",
    ),
    "another shape": (
        lambda tensors, header: tensors.update(a=torch.zeros(3, 1)),
        r"'a' must be float32 \(3,\), got float32 \(3, 1\)",
    ),
    "another dtype": (
        lambda tensors, header: tensors.update(a=tensors["a"].double()),
        r"'a' must be float32 \(3,\), got float64 \(3,\)",
    ),
    "no list": (lambda tensors, header: header.pop("tensors"), "lists no tensors"),
    "another list": (
        lambda tensors, header: header["tensors"].pop("b"),
        "has a tensor 'b', which its header does not list",
    ),
}


@pytest.mark.parametrize(("change", "match"), NOT_AS_LISTED.values(), ids=NOT_AS_LISTED)
def test_tensors_are_those_that_the_header_lists(path, change, match):
    SNAPSHOT.write(path)
    damage(path, change)
    refused(f"kept.safetensors is damaged: .*{match}.*Save it again", storage.read, path)


def test_files_of_other_versions_are_refused_as_such(path):
    SNAPSHOT.write(path)
    rewrite(path, lambda tensors, header: header.update(format=storage.FORMAT + 1, library="9.0"))
    newer = rf"format {storage.FORMAT + 1}, but this version only reads.*pip install .*>=9\.0'"
    refused(newer, storage.read, path)
    rewrite(path, lambda tensors, header: header.update(format=storage.FORMAT - 1))
    refused("written by an earlier version of rigidities.*Fit again", storage.read, path)


def test_a_file_of_another_kind_is_refused(path):
    SNAPSHOT.write(path)
    assert Snapshot.read(path, holds="test").header["kind"] == "test"
    refused(
        "kept.safetensors is of another kind: expected 'fit', its header says 'test'",
        Snapshot.read,
        path,
        holds="fit",
    )


def test_what_a_class_misses_in_a_file_is_named(path):
    SNAPSHOT.write(path)
    snapshot = Snapshot.read(path, holds="test")

    def take(size):
        return size

    for read, match in (
        (lambda: snapshot.tensors["c"], "lacks 'c', which this version needs"),
        (lambda: snapshot.header["size"], "lacks 'size', which this version needs"),
        (lambda: take(tilt=1), "not as this version needs it: .*unexpected keyword .*'tilt'"),
    ):
        with (
            pytest.raises(ValueError, match=f"kept.safetensors.*{match}.*pip install"),
            snapshot.opened(),
        ):
            read()


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[]", "{}", "7", '{"format": 1e999}', '{"format": "x"}', '{"format": null}'],
    ids=lambda text: text[:16],
)
def test_a_header_that_is_none_is_refused_by_the_files_name(path, text):
    SNAPSHOT.write(path)
    rewritten(path, rigidities=text)
    refused("kept.safetensors is damaged", storage.read, path)


def test_files_of_one_object_are_equal_byte_for_byte(tmp_path):
    names = [f"{i}.safetensors" for i in range(20)]
    header = {"kind": "test", "z": "Größe", "y": 2}
    written = Snapshot({"b": torch.ones(3), "a": torch.arange(5)}, header)
    for name in names:
        written.write(tmp_path / name)
    contents = {(tmp_path / name).read_bytes() for name in names}
    assert len(contents) == 1
    (content,) = contents
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert list(json.loads(content[8 : 8 + length])["__metadata__"]) == ["checksum", "rigidities"]
    again = Snapshot.read(tmp_path / names[0], holds="test")
    assert again.header["z"] == "Größe" and torch.equal(again.tensors["a"], torch.arange(5))


SAVING = """
import sys, torch
import rigidities as rg
from tests.support.nets import trained
one = trained()
uq = rg.LastLayerRigidity(one.model).fit(one.train)
uq.calibrate(one.valid, method="paper").conformalize(one.test)
uq.save(sys.argv[1])
"""


@pytest.mark.thorough
def test_processes_with_other_hash_seeds_write_the_same_bytes(tmp_path):
    contents = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SAVING, str(tmp_path / seed)]
        subprocess.run(command, env=environment, check=True)
        contents.add((tmp_path / seed).read_bytes())
    assert len(contents) == 1


def test_what_was_read_does_not_follow_the_file(path):
    SNAPSHOT.write(path)
    tensors, _ = storage.read(path)
    with path.open("r+b") as file:
        file.seek(-12, os.SEEK_END)
        file.write(b"\xff" * 12)
    assert torch.equal(tensors["a"], torch.arange(3.0))


# --- writing ------------------------------------------------------------------------------------


def names(folder):
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_keeps_its_permissions(path, mode):
    SNAPSHOT.write(path)
    path.chmod(mode)
    SNAPSHOT.write(path)
    assert path.stat().st_mode & 0o777 == mode


def test_the_umask_holds_for_a_new_file_and_is_not_touched(path, monkeypatch):
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", None)
        SNAPSHOT.write(path)
    finally:
        monkeypatch.undo()
        assert os.umask(before) == 0o027
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path, exists):
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "real", tmp_path / "link"
    link.symlink_to(os.path.join("far", "real"))
    if exists:
        real.write_bytes(b"old")
    SNAPSHOT.write(link)
    assert link.is_symlink() and not real.is_symlink()
    assert storage.read(real)[1]["kind"] == "test"
    assert names(tmp_path) == ["far", "link"] and names(real.parent) == ["real"]


HELD = """
import os, sys, time
from rigidities.data.storage import Snapshot

def wait(handle):
    print("writing", flush=True)
    time.sleep(600)

os.fsync = wait
Snapshot({}, {"kind": "test"}).write(sys.argv[1])
"""


@pytest.fixture
def writer(path):
    """Another process in the middle of its write."""
    command = [sys.executable, "-c", HELD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def beginning(path):
    """Of the names of a file's temporaries."""
    return f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}."


@pytest.mark.thorough
def test_temporaries_of_a_killed_writer_go_with_the_next_save(path, writer):
    SNAPSHOT.write(path)
    assert len(names(path.parent)) == 2  # it may still take its place
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert len(names(path.parent)) == 2
    SNAPSHOT.write(path.with_name("another"))
    assert len(names(path.parent)) == 3
    SNAPSHOT.write(path)
    assert names(path.parent) == ["another", path.name]


def test_temporaries_of_other_machines_go_when_they_are_old(path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    foreign = path.with_name(f"{beginning(path)}00000000-{dead.pid}-00000000.tmp")
    users = path.with_name(f"{beginning(path)}mine.tmp")
    for one in (foreign, users):
        one.touch()
    SNAPSHOT.write(path)
    assert foreign.exists()
    hours_ago = time.time() - 2 * 3600
    for one in (foreign, users):
        os.utime(one, (hours_ago, hours_ago))
    SNAPSHOT.write(path)
    assert not foreign.exists() and users.exists()


def test_saves_to_one_path_at_once_do_not_harm_each_other(path):
    failed = []

    def work():
        try:
            for _ in range(20):
                SNAPSHOT.write(path)
                storage.read(path)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed and names(path.parent) == [path.name]


@pytest.mark.parametrize("name", ["a[b]*(c.safetensors", "n" * 255, "\u00fc" * 127])
def test_a_name_may_be_any_that_the_file_system_takes(tmp_path, name):
    left = tmp_path / f"{beginning(tmp_path / name)}{storage._HOST}-999999999-00000000.tmp"
    left.touch()
    SNAPSHOT.write(tmp_path / name)
    assert names(tmp_path) == [name] and storage.read(tmp_path / name)[1]["kind"] == "test"
