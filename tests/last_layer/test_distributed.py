"""Fits, calibrations and predictions of several processes, against those of one."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import rigidities as rg
from tests.support import jobs, markdown
from tests.support.nets import data

pytestmark = pytest.mark.xdist_group("jobs")

SHARES = {2: [0, 140, 400], 4: [0, 70, 70, 301, 400]}
"""Where the rows of each rank begin; with four, the second has none."""


def net(targets=1, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 12), torch.nn.Tanh(), torch.nn.Linear(12, targets)
    )


def shared(rows, rank, size):
    begin, end = SHARES[size][rank : rank + 2]
    return [part[begin * len(part) // 400 : end * len(part) // 400] for part in rows]


def batches(rows, size=32):
    """As loaders give them: none of none."""
    return list(zip(*(part.split(size) for part in rows), strict=True)) if len(rows[0]) else []


def wait_for(path, seconds=60):
    """Until a file of another rank is there."""
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not come."
        time.sleep(0.01)


def assert_unfitted(uq):
    with pytest.raises(ValueError, match="There is no fit yet"):
        uq.gram  # noqa: B018


def close(one, other, tolerance=1e-12):
    return float((one - other).abs().max()) <= tolerance * float(other.abs().max())


def everything(rank, size, folder, options):
    """One pass through the library, by all ranks together and by each alone."""
    mixed = options.get("precision") == "mixed"
    kind = torch.float32 if mixed else torch.float64  # float32 rounds as a batch's size wills
    near = partial(close, tolerance=1e-6 if mixed else 1e-12)
    train, valid, more = ([part.to(kind) for part in data(400, 1, seed)] for seed in (1, 2, 3))
    own, model = partial(shared, rank=rank, size=size), net().to(kind)
    uq = rg.LastLayerRigidity(model).fit(batches(own(train)), **options)
    one = rg.LastLayerRigidity(model, process_group=False).fit(tuple(train), **options)
    assert uq.gram.count == one.gram.count == 400
    assert near(uq.gram.matrix, one.gram.matrix)
    assert near(uq.gram.cross, one.gram.cross)
    mine, theirs = folder / f"mine{rank}", folder / f"theirs{rank}"
    uq.save(mine, rows=True)
    one.save(theirs, rows=True)
    mine, theirs = load_file(mine), load_file(theirs)
    for name in ("sketch.hashes", "sketch.limit", "rows.hashes", "rows.limit"):
        assert torch.equal(mine[name], theirs[name]), name
    uq.partial_fit(batches(own(more)))
    assert near(uq.gram.matrix, one.partial_fit(tuple(more)).gram.matrix)
    uq.forget(batches(own(more)))
    assert near(uq.gram.matrix, one.forget(tuple(more)).gram.matrix)
    uq.save(folder / f"fit{rank}", rows=True)
    report = uq.calibrate(batches(own(valid))).calibration_report
    alone = one.calibrate(tuple(valid)).calibration_report
    assert report.rows == alone.rows == 400
    # The sums of mixed precision differ by 1e-6, and a fit of hundreds of steps by more.
    assert report.nll == pytest.approx(alone.nll, abs=1e-2 if mixed else 1e-6)
    uq.save(folder / f"calibrated{rank}", rows=True)
    p, q = uq.predict(batches(own(more)), gather=True), one.predict(more[0])
    assert near(p.mean, q.mean)
    assert close(p.std, q.std, 2e-2 if mixed else 1e-4)
    assert len(uq.predict(more[0][:7])) == 7  # nothing is exchanged
    return p.interval(0.9)[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "options"),
    [(4, {}), (2, {"precision": "mixed"}), (2, {"keep_rows": 64})],
    ids=["double", "mixed", "few rows kept"],
)
def test_ranks_end_with_the_fit_of_one_process_and_with_the_same_bytes(size, options, tmp_path):
    first, *others = jobs.values(everything, size, tmp_path, options)
    assert all(torch.equal(first, other) for other in others)
    for name in ("fit", "calibrated"):
        first, *others = ((tmp_path / f"{name}{rank}").read_bytes() for rank in range(size))
        assert all(other == first for other in others)


def several(rank, size):
    """Targets, weights, derivatives, conformal groups and a refit."""
    own = partial(shared, rank=rank, size=size)
    train, valid, fresh = ([part.double() for part in data(400, 3, seed)] for seed in (1, 2, 3))
    weight = lambda batch: 0.5 + batch[0][:, 0].abs()  # noqa: E731
    model = net(3).double()
    uq = rg.LastLayerRigidity(model).fit(batches(own(train)), loss="huber", sample_weight=weight)
    one = rg.LastLayerRigidity(model, process_group=False)
    one.fit(tuple(train), loss="huber", sample_weight=weight)
    assert uq.gram.targets == one.gram.targets == 3
    assert close(uq.gram.matrix, one.gram.matrix)
    groups = lambda batch: (batch[0][:, 1] > 0).long()  # noqa: E731
    method = rg.Paper(noise=lambda batch: 1 + batch[0][:, 0] ** 2)
    uq.calibrate(batches(own(valid)), method=method)
    uq.conformalize(batches(own(fresh)), groups=groups)
    one.calibrate(tuple(valid), method=method)
    one.conformalize(tuple(fresh), groups=groups)
    assert close(uq.scale, one.scale, 1e-9)
    mine, theirs = (
        each.predict([tuple(valid)]).interval(0.8, conformal=True) for each in (uq, one)
    )
    assert close(mine[0], theirs[0], 1e-9)
    plain = rg.LastLayerRigidity(model).fit(batches(own(train)))
    refitted = plain.refit(batches(own(valid)))
    alone = rg.LastLayerRigidity(model, process_group=False).fit(tuple(train))
    alone = alone.refit(tuple(valid))
    assert close(refitted.model[-1].weight, alone.model[-1].weight, 1e-9)
    assert refitted.refitted.judged == alone.refitted.judged == 400
    return uq.scale


@pytest.mark.thorough
def test_targets_weights_functions_and_refits_of_ranks_are_those_of_one_process():
    first, *others = jobs.values(several, 2)
    assert all(torch.equal(first, other) for other in others)


def derivatives(rank, size):
    """A scale of its own for forces."""
    model, train = net().double(), [part.double() for part in data(80, 1, 1)]
    slope = lambda batch: torch.cos(batch[0]) * (batch[0][:, :1] > -9)  # noqa: E731
    own = partial(shared, rank=rank, size=size)
    loss = rg.GradientLoss(0, target=slope)
    uq = rg.LastLayerRigidity(model).fit(batches(own(train)), gradient_loss=loss)
    one = rg.LastLayerRigidity(model, process_group=False).fit(tuple(train), gradient_loss=loss)
    valid = [part.double() for part in data(80, 1, 2)]
    uq.calibrate(batches(own(valid)), method="paper")
    one.calibrate(tuple(valid), method="paper")
    scale = uq.calibration_report.gradient_scale
    assert close(scale, one.calibration_report.gradient_scale, 1e-9)
    return scale


def test_derivatives_are_calibrated_on_the_rows_of_all_ranks():
    first, other = jobs.values(derivatives, 2)
    assert torch.equal(first, other)


def refusals(rank, size):
    """One after the other on one group: a refusal leaves it, and the object, as they were."""
    train = data(400, 1, 1)
    own = tuple(shared(train, rank, size))
    uq = rg.LastLayerRigidity(net()).fit(own)
    before, said = uq.gram.matrix, []
    nan = torch.full_like(own[0], torch.nan if rank else 1.0)

    def asked(call):
        with pytest.raises((ValueError, RuntimeError)) as refused:
            call()
        assert torch.equal(uq.gram.matrix, before)
        said.append((isinstance(refused.value, ValueError), str(refused.value)))

    asked(lambda: rg.LastLayerRigidity(net(seed=rank)).fit(own))
    asked(lambda: rg.LastLayerRigidity(net(), layer=[None, "0"][rank]).fit(own))
    asked(lambda: uq.fit(own, loss=["mse", "huber"][rank]))
    asked(lambda: uq.fit(own, precision=["double", "mixed"][rank]))
    asked(lambda: uq.fit(train))
    asked(lambda: uq.fit((nan, own[1])))
    asked(lambda: uq.fit(own) if rank else uq.partial_fit(own))
    asked(lambda: (rg.LastLayerRigidity(net()) if rank else uq).calibrate(own))
    asked(lambda: uq.calibrate(data(400, 1, 2)))
    asked(lambda: uq.fit([]))
    asked(lambda: uq.forget(tuple(shared(data(400, 1, 7), rank, size))))
    mine = rg.LastLayerRigidity(net(), process_group=False).fit(own)
    mine.process_group = None
    asked(lambda: mine.calibrate(own))
    mine = rg.LastLayerRigidity(net(), process_group=False).fit((train[0], train[1] + rank))
    mine.process_group = None
    asked(lambda: mine.partial_fit(own))
    valid = tuple(shared(data(400, 1, 2), rank, size))
    asked(lambda: uq.calibrate(valid, method=["full", "paper"][rank]))
    asked(lambda: uq.calibrate(valid, method=rg.Full(support=[None, (-99, 99)][rank])))
    asked(lambda: uq.forget(own, check=bool(rank)))
    asked(lambda: uq.refit(valid, add=bool(rank)))
    asked(lambda: uq.predict(valid[0], input_covariance=[None, 0.1][rank], gather=True))
    asked(lambda: (uq if rank else rg.LastLayerRigidity(net())).predict(valid[0], gather=True))
    mine = rg.LastLayerRigidity(net()).fit(own)
    mine.process_group = False
    mine.calibrate(valid, method="paper")
    mine.process_group = None
    asked(lambda: mine.predict(valid[0], gather=True))
    uq.calibrate(valid)
    asked(lambda: uq.conformalize(valid, groups=[None, "bar"][rank]))
    return said


@pytest.mark.thorough
def test_ranks_that_differ_are_refused_on_all_of_them_and_nothing_is_lost():
    found = jobs.values(refusals, 2)
    for one, other in zip(*found, strict=True):
        assert one[0] and other[0], (one, other)  # ValueErrors
    here = [message for _, message in found[0]]
    there = [message for _, message in found[1]]
    parts = [
        "Rank 0 and Rank 1 differ in their weights",
        "differ in their readout: {'layer': None} and {'layer': '0'}",
        "differ in their loss",
        "'double' and 'mixed'. They cannot be merged into one fit. Fit every",
        "of rank 1 (of those compared by hash) are also in the data of other ranks. Give",
        "Batch 0: NaN or infinity in the features",
        "Rank 0 calls partial_fit, rank 1 calls fit",
        "There is no fit yet",
        "are also in the data of other ranks",
        "There are no data",
        "were never in the fit",
        "differ in their rows",
        "differ in their rows",
        *["differ in their options"] * 5,
        "There is no fit yet",
        "differ in their calibration",
        "differ in their options",
    ]
    for part, one, other in zip(parts, here, there, strict=True):
        assert part in one and part in other, (part, one, other)
    assert here[5].startswith("Rank 1 failed in fit (ValueError: Batch 0")


GONE = "The processes could not meet in fit: one of them has ended"


def killed(rank, size, victim, moment, folder):
    """A rank ends without a word in the middle of its data; the others live on."""
    rows = shared(data(400, 1, 1), rank, size)

    def slow():
        for number, batch in enumerate(batches(rows, 8)):
            if rank == victim and number == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
            yield batch

    group = dist.new_group(timeout=timedelta(seconds=10))
    uq = rg.LastLayerRigidity(net(), process_group=group)
    try:
        uq.fit(slow())
    finally:
        assert_unfitted(uq)
        # No rank may owe its error to the end of one that has its error already.
        (folder / f"raised {rank}").touch()
        for other in set(range(size)) - {victim}:
            wait_for(folder / f"raised {other}", 40)


@pytest.mark.thorough
@pytest.mark.parametrize(("victim", "moment"), [(0, 3), (2, 1), (3, 11)])
def test_a_rank_that_is_killed_gives_an_error_on_all_others(victim, moment, tmp_path):
    found = jobs.run(killed, 4, victim, moment, tmp_path)
    assert isinstance(found.pop(victim), jobs.Ended)
    for error in found:
        assert isinstance(error, RuntimeError)
        assert str(error).startswith(GONE)
        assert "start the job again" in str(error)


def parts_of_a_job(rank, size):
    """Some ranks alone, and one by itself."""
    train = data(400, 1, 1)
    few = dist.new_group([1, 3])
    uq = rg.LastLayerRigidity(net(), process_group=few)
    if rank in (1, 3):
        half = tuple(part[rank // 2 :: 2] for part in train)
        uq.fit(half)
        return uq.fit(half).gram.count
    if rank == 0:
        with pytest.raises(ValueError, match="not in the group"):
            uq.fit(train)
    return rg.LastLayerRigidity(net(), process_group=False).fit(train).gram.count


def test_a_group_of_ranks_or_one_by_itself_fits_without_the_others():
    assert jobs.values(parts_of_a_job, 4) == [400, 400, 400, 400]


def repeated(rank, size):
    """A row that stands in the data of both ranks, as real data have it."""
    rows, again = shared(data(400, 1, 1), rank, size), data(1, 1, 9)
    rows = tuple(torch.cat(parts) for parts in zip(rows, again, strict=True))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = rg.LastLayerRigidity(net()).fit(rows).gram.count
    return count, [str(one.message) for one in said]


def test_rows_that_the_data_repeat_are_counted_with_a_word():
    (count, said), (other, silence) = jobs.values(repeated, 2)
    assert count == other == 402
    assert len(said) == 1 and said[0].startswith(
        "Some rows (1, compared by hash) are in the data of"
    )
    assert not silence


class Slow(torch.utils.data.Dataset):
    """Rows that take a second to read, by a loader's workers."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        time.sleep(1 if number else 0)
        x, y = data(8, 1, 1)
        return x[number], y[number]


def killed_with_workers(rank, size, folder):
    """A rank is killed while its workers, which were forked in the middle of the fit, live on."""
    loader = torch.utils.data.DataLoader(
        Slow(), 1, num_workers=1, multiprocessing_context="fork", timeout=100
    )

    def rows():
        for batch in loader:
            (folder / "begun").touch()
            yield batch

    if rank:
        threading.Thread(target=_killed_when, args=(folder / "begun",), daemon=True).start()
        return rg.LastLayerRigidity(net()).fit(rows())
    with pytest.raises(RuntimeError, match=GONE):
        rg.LastLayerRigidity(net()).fit(batches(shared(data(400, 1, 1), 0, 2)))
    return "noticed"


def _killed_when(path):
    while not path.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="a signal of POSIX")
def test_a_killed_rank_is_noticed_when_the_workers_of_its_loader_have_ended_too(tmp_path):
    assert jobs.run(killed_with_workers, 2, tmp_path)[0] == "noticed"


def failing(rank, size, folder, culprit, error):
    """One rank fails on its first batch, and says so at once; the other reads until it has."""
    rows = batches(shared(data(400, 1, 1), rank, size))

    def reading():
        yield rows[0]
        if rank == culprit:
            raise error
        wait_for(folder / "said")
        yield rows[1]

    def show(message, *details, **names):
        (folder / "unfinished").write_text(str(message))
        (folder / "unfinished").rename(folder / "said")

    uq = rg.LastLayerRigidity(net())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        with pytest.raises((type(error), RuntimeError)) as failed:
            uq.fit(reading())
    assert_unfitted(uq)
    # The same group still serves.
    return failed.typename, str(failed.value), uq.fit(rows).gram.count


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the file is gone")], ids=repr)
def test_an_error_of_one_rank_is_said_at_once_and_raised_on_all(culprit, error, tmp_path):
    found = jobs.values(failing, 2, tmp_path, culprit, error)
    assert found.pop(culprit) == (type(error).__name__, str(error), 400)
    ((kind, said, count),) = found
    assert (kind, count) == ("ProcessFailed", 400)
    named = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    assert said.startswith(f"Rank {culprit} failed in fit ({named}), so the call was cancelled on")
    notice = (tmp_path / "said").read_text()
    assert notice.startswith(f"Rank {culprit} has failed in fit ({named}). It raises this error")


def strict(rank, size):
    """A rank that fails where warnings are errors."""
    rows = batches(shared(data(400, 1, 1), rank, size))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((OSError, RuntimeError)) as failed:
            rg.LastLayerRigidity(net()).fit(_broken(rows) if rank else rows)
    return failed.typename


def _broken(rows):
    yield rows[0]
    raise OSError("the file is gone")


def test_a_rank_raises_its_own_error_where_warnings_are_errors():
    assert jobs.values(strict, 2) == ["ProcessFailed", "OSError"]


def failing_before_a_late_one(rank, size):
    """A rank fails, and the other does not come within the timeout to hear of it."""
    rows = batches(shared(data(400, 1, 1), rank, size), 200)

    def late():
        time.sleep(8)
        yield from rows

    group = dist.new_group(timeout=timedelta(seconds=4))
    with pytest.raises((OSError, RuntimeError)) as failed:
        rg.LastLayerRigidity(net(), process_group=group).fit(_broken(rows) if rank else late())
    return failed.typename, str(failed.value)


@pytest.mark.thorough
def test_a_rank_raises_its_own_error_where_nobody_comes_to_hear_it():
    (_, said), failed = jobs.values(failing_before_a_late_one, 2)
    assert said.startswith(GONE)
    assert failed == ("OSError", "the file is gone")


def anew(rank, size, folder):
    """The job is initialised again, with a timeout below the time that a rank reads."""
    rows = batches(shared(data(400, 1, 1), rank, size), 200)
    before = rg.LastLayerRigidity(net()).fit(rows).gram.matrix
    dist.destroy_process_group()
    place = {"init_method": f"file://{folder / 'again'}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=5), **place)
    dist.barrier()
    again = rg.LastLayerRigidity(net()).fit(rows).gram.matrix

    def slowly():
        for batch in rows:
            time.sleep(10 * rank / len(rows))
            yield batch

    dist.barrier()
    uq = rg.LastLayerRigidity(net())
    with pytest.raises(RuntimeError, match="pass a longer timeout= to init_process_group"):
        uq.fit(slowly())
    assert_unfitted(uq)
    return torch.equal(before, again)


@pytest.mark.thorough
def test_a_job_initialised_anew_fits_and_a_rank_may_not_read_longer_than_its_timeout(tmp_path):
    assert jobs.values(anew, 2, tmp_path) == [True, True]


WIDTH = 400
"""Features of the model whose rows are counted in bytes."""


def counted(rank, size):
    """How many bytes a rank hands over, beside the matrices, where rows are wide."""
    sent, gather = [], dist.all_gather_object

    def counting(found, mine, group=None):
        sent.append(len(pickle.dumps(mine)))
        gather(found, mine, group=group)

    dist.all_gather_object = counting
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, WIDTH - 1), torch.nn.Linear(WIDTH - 1, 1))
    rows = tuple(part[rank::size] for part in data(800, 1, 1))
    rg.LastLayerRigidity(model).fit(rows, keep_rows=100)
    return sum(sent)


def test_only_the_rows_of_the_common_sample_and_no_matrices_are_gathered():
    sent = jobs.values(counted, 4)
    row, matrix = 4 * WIDTH, 8 * WIDTH**2
    # Each rank keeps 100 of its 200 rows, and all together have 100 in the end.
    assert 100 * row < sum(sent) < 200 * row < matrix


def masked(rank, size):
    """Targets are masked in the rows of the last rank alone: it alone has a Gram for each."""
    train = [part.double() for part in data(400, 3, 1)]
    train[1][390:, 1] = 7.0
    weight = lambda batch: (batch[1] != 7.0).double()  # noqa: E731
    uq = rg.LastLayerRigidity(net(3).double())
    uq.fit(batches(shared(train, rank, size)), sample_weight=weight)
    one = rg.LastLayerRigidity(net(3).double(), process_group=False)
    one.fit(tuple(train), sample_weight=weight)
    assert uq.gram.targets == one.gram.targets == 3
    assert torch.equal(uq.gram.zeros, one.gram.zeros)
    assert close(uq.gram.matrix, one.gram.matrix) and close(uq.gram.cross, one.gram.cross)
    return uq.gram.matrix


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_which_one_has_a_gram_for_each_target_have_the_fit_of_one_process(size):
    first, *others = jobs.values(masked, size)
    assert all(torch.equal(first, other) for other in others)


def of_steps(model, x):
    """Features of one weight vector behind all entries of x."""
    return torch.stack([x, x.square(), torch.ones_like(x)], -1)


def other_targets(rank, size, odd):
    """One rank alone has a batch with fewer targets: they cannot count in their own units."""
    x = data(40, 1, 1)[0].double()
    parts = [[x[:10], x[10:20]], [x[20:30], x[30:]]]
    parts[odd][1] = parts[odd][1][:, :3]
    rows = [[(part, 10.0**i * part) for i, part in enumerate(of_rank)] for of_rank in parts]
    uq = rg.LastLayerRigidity(torch.nn.Identity(), features=of_steps).fit(rows[rank])
    one = rg.LastLayerRigidity(torch.nn.Identity(), features=of_steps, process_group=False)
    one.fit(rows[0] + rows[1])
    assert uq.gram.count == one.gram.count == 40 * 4 - 10
    assert close(uq.gram.matrix, one.gram.matrix) and close(uq.gram.cross, one.gram.cross)
    return uq.gram.matrix


@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_of_which_one_has_batches_of_other_targets_have_the_fit_of_one_process(odd):
    first, second = jobs.values(other_targets, 2, odd)
    assert torch.equal(first, second)


TORCHRUN = Path(__file__).parents[1] / "support" / "torchrun_job.py"


SCENES = {
    "other weights": "differ in their weights",
    "other options": "differ in their precision",
    "raises": "Rank 1 failed in fit (OSError: the file is gone)",
    "interrupted": "Rank 1 failed in fit (KeyboardInterrupt)",
    "killed while others read": GONE,
}
"""What happens to the second of three ranks, one after the other, and what the others are told."""


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    "scenes", [SCENES, {"killed while others wait": GONE}], ids=["all", "killed last"]
)
def test_torchrun_ends_with_an_error_on_every_rank(scenes, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*launch, str(TORCHRUN), str(tmp_path), *scenes],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode, done.stderr
    for scene, said in scenes.items():
        for rank in (0, 2):
            told = tmp_path / f"{scene} {rank}"
            assert told.is_file(), done.stderr
            assert said in told.read_text(), scene


def unequal(rank, size):
    """Ranks with other numbers of threads round otherwise, each for itself."""
    torch.set_num_threads(1 + rank)
    own = partial(shared, rank=rank, size=size)
    uq = rg.LastLayerRigidity(net()).fit(batches(own(data(4000, 1, 1))))
    for seed in (2, 3):
        uq.partial_fit(batches(own(data(4000, 1, seed))))
    uq.forget(batches(own(data(4000, 1, 2))))
    refitted = uq.refit(batches(own(data(400, 1, 4))))
    return uq.gram.matrix, refitted.model[-1].weight.detach()


def test_ranks_that_round_otherwise_end_with_the_same_bits():
    one, other = jobs.values(unequal, 2)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def discrete(rank, size):
    """Data of few values, in which rows repeat everywhere."""
    torch.manual_seed(rank)
    x = torch.randint(0, 3, (200, 4)).float()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = rg.LastLayerRigidity(net()).fit((x, x[:, :1])).gram.count
    return count, len(said)


def test_data_that_repeat_their_rows_within_a_rank_too_are_fitted_with_a_word():
    assert jobs.values(discrete, 2) == [(400, 1), (400, 0)]


def padded(rank, size):
    """What torch's sampler repeats is predicted as the loader has it, and gathered once."""
    rows = torch.utils.data.TensorDataset(*data(401, 1, 1))
    sampler = torch.utils.data.DistributedSampler(rows, shuffle=False)
    loader = torch.utils.data.DataLoader(rows, 64, sampler=sampler)
    uq = rg.LastLayerRigidity(net()).fit(loader)
    uq.calibrate(tuple(shared(data(400, 1, 2), rank, size)), method="paper")
    given = sum(len(x) for x, _ in loader)
    return uq.gram.count, given, len(uq.predict(loader)), len(uq.predict(loader, gather=True))


def test_a_padded_loader_is_fitted_once_predicted_as_it_is_and_gathered_once():
    assert jobs.values(padded, 2) == [(401, 201, 201, 401)] * 2


def subsets(rank, size):
    """The block of docs/processes.md, on one rank, and all rows in one process."""
    x, y = (part.double() for part in data(401, 1, 1))
    valid = torch.utils.data.TensorDataset(*(part.double() for part in data(101, 1, 2)))
    dataset, model = torch.utils.data.TensorDataset(x, y), net().double()
    names = {"dataset": dataset, "valid": valid, "model": model}
    code = markdown.block("processes.md", "fit.py").replace("dist.init_process_group()", "")
    exec(code.partition("if dist.get_rank() == 0:")[0], names)
    uq = names["uq"]
    alone = rg.LastLayerRigidity(model, process_group=False).fit(x, y)
    assert uq.gram.count == 401 and uq.calibration_report.rows == 101
    assert close(uq.gram.matrix, alone.gram.matrix)
    return uq.gram.matrix, uq.scale


def test_two_processes_that_read_subsets_have_the_gram_of_one():
    (first, scale), (second, other_scale) = jobs.values(subsets, 2)
    assert torch.equal(first, second) and torch.equal(scale, other_scale)
