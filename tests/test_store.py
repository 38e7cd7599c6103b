"""The store keeps what was written, whole cells only, for any process that comes after."""

import datetime
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
import zarr

import lim
from lim import store

LAYOUT = dict(axes={"rope": (["on", "off"], [1.0, 0.0]), "layers": [1, 2]}, seeds=(5, 6), length=4, metrics=("first", "seconds"),
              theory_metrics=("bias",), grid=dict(axes={"rope": {"on": 1.0, "off": 0.0}}, source=0), attributes=dict(flags={}))  # fmt: skip


def make(path, **changes):
    return store.Store(path, **{**LAYOUT, **changes})


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_is_written_is_read_under_its_labels(tmp_path):
    into = make(tmp_path)
    into.write((1, 0, 1), "done", influence=[1.0, 2.0, 3.0], stderr=np.zeros(4), metrics=[7.0, 8.0], theory=[4.0] * 3, theory_error="no")
    into.write((0, 0, 0), "failed", error="why")
    ds = lim.open(tmp_path)
    cell = ds.sel(rope="off", layers=1, seed=6)
    np.testing.assert_array_equal(cell.influence, [1, 2, 3, np.nan])
    np.testing.assert_array_equal(cell.theory, [4, 4, 4, np.nan])
    assert (cell.status, cell.theory_error, cell.metrics.sel(metric="seconds")) == ("done", "no", 8)
    assert ds.rope_value.sel(rope="off") == 0 and ds.sizes["position"] == 4
    assert (ds.status.values == np.array([[["failed", "pending"], ["pending"] * 2], [["pending", "done"], ["pending"] * 2]])).all()
    assert ds.error.sel(rope="on", layers=1, seed=5) == "why" and ds.attrs["flags"] == {}
    assert np.isnan(ds.influence).sum() == 32 - 3


def test_a_second_creator_changes_nothing_and_completes_what_a_killed_one_left(tmp_path):
    make(tmp_path).write((0, 0, 0), "done", influence=np.ones(4))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    make(tmp_path, attributes=dict(flags={"other": 1}))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    shutil.rmtree(tmp_path / store.NAME / "status")
    (tmp_path / store.NAME / "layers" / "c" / "0").unlink()
    make(tmp_path)
    ds = lim.open(tmp_path)
    assert list(ds.layers) == [1, 2] and (ds.status == "pending").all() and ds.influence[0, 0, 0, 0] == 1


def test_another_grid_is_refused_with_the_difference(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match="rope is on,off there, off here; source is 0 there, 1 here"):
        make(tmp_path, grid=dict(axes={"rope": {"off": 0.0}}, source=1))
    with pytest.raises(ValueError, match="rope.off is 0.0 there, 0.5 here$"):
        make(tmp_path, grid=dict(axes={"rope": {"on": 1.0, "off": 0.5}}, source=0))
    with pytest.raises(ValueError, match="mlp is not given there, off here$"):
        make(tmp_path, grid=dict(axes={"rope": {"on": 1.0, "off": 0.0}, "mlp": {"off": 0.0}}, source=0))


@pytest.mark.parametrize("changes, message", [
    (dict(axes={"rope": (["off", "on"], [0.0, 1.0]), "layers": [1, 2]}, grid=dict(axes={"rope": {"off": 0.0, "on": 1.0}}, source=0)),
     "the order of rope is on,off there, off,on here"),
    (dict(grid=dict(axes={"layers": {"1": 1}, "rope": {"on": 1.0, "off": 0.0}}, source=0)), "the order of the axes is rope,layers there"),
])  # fmt: skip
def test_the_same_values_in_another_order_are_refused(changes, message, tmp_path):
    """Places would mean other cells: labels must never change under numbers."""
    grid = dict(axes={"rope": {"on": 1.0, "off": 0.0}, "layers": {"1": 1}}, source=0)
    first = dict(grid=grid) if "layers" in changes["grid"]["axes"] else {}
    make(tmp_path, **first).write((0, 0, 0), "done", influence=np.ones(4))
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **changes)
    assert list(lim.open(tmp_path).rope.values) == ["on", "off"]


def test_a_newer_schema_and_other_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no grid"):
        lim.open(tmp_path)
    make(tmp_path)
    zarr.open_group(tmp_path / store.NAME, mode="r+").attrs["schema"] = store.SCHEMA + 1
    for attempt in (lambda: lim.open(tmp_path), lambda: make(tmp_path)):
        with pytest.raises(ValueError, match=f"newer lim .schema {store.SCHEMA + 1}; this one reads up to {store.SCHEMA}"):
            attempt()


@pytest.mark.parametrize("status, host, pid, age, free", [
    ("pending", None, None, 0, True),
    ("done", None, None, 0, False),
    ("failed", None, None, 0, False),
    ("running", socket.gethostname(), os.getppid(), 0, False),  # its process lives
    ("running", socket.gethostname(), os.getppid(), 10**9, True),  # the number lives, the process is a younger one
    ("running", socket.gethostname(), "dead", 0, True),
    ("running", socket.gethostname(), os.getpid(), 0, True),  # this process has nothing in hand when it claims
    ("running", "elsewhere", 1, 0, False),
    ("running", "elsewhere", 1, store.LEASE - 60, False),
    ("running", "elsewhere", 1, store.LEASE + 60, True),
], ids="pending done failed alive younger dead own elsewhere-new elsewhere-aging elsewhere-old".split())  # fmt: skip
def test_a_claim_takes_over_from_the_dead_only(tmp_path, status, host, pid, age, free):
    into = make(tmp_path)
    when = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)
    into.write((0, 0, 0), status, worker=f"{host}/{dead_process() if pid == 'dead' else pid} {when.isoformat()}")
    assert into.claim([(0, 0, 0)]) == [(0, 0, 0)] * free
    now = lim.open(tmp_path).isel(rope=0, layers=0, seed=0)
    assert now.status == ("running" if free else status)
    assert str(now.worker.values).startswith(f"{socket.gethostname()}/{os.getpid()} ") == free


def test_who_is_alone_takes_over_from_anybody(tmp_path):
    into = make(tmp_path)
    into.write((0, 0, 0), "running", worker=f"elsewhere/1 {datetime.datetime.now(datetime.UTC).isoformat()}")
    into.write((0, 0, 1), "done")
    assert into.claim([(0, 0, 0), (0, 0, 1)], alone=True) == [(0, 0, 0)]


def test_failed_cells_are_claimed_when_asked_and_lose_their_error(tmp_path):
    into = make(tmp_path)
    into.write((0, 0, 0), "failed", error="why")
    assert into.claim([(0, 0, 0)]) == [] and into.claim([(0, 0, 0)], retry_failed=True) == [(0, 0, 0)]
    into.write((0, 0, 0), "done", influence=np.ones(4))
    assert lim.open(tmp_path).error[0, 0, 0] == ""


def test_a_released_cell_leaves_no_file(tmp_path):
    into = make(tmp_path)
    into.claim([(0, 0, 0)])
    into.release([(0, 0, 0)])
    assert (into.status() == "pending").all()
    assert not any(path.is_file() for path in (tmp_path / store.NAME / "status" / "c").rglob("*"))


def test_what_another_worker_has_done_stays_done(tmp_path):
    """Two may hold one cell: the slower one's failure or its end takes nothing back."""
    into, cells = make(tmp_path), [(0, 0, 0), (0, 0, 1)]
    assert into.claim(cells) == cells
    make(tmp_path).write(cells[0], "done", influence=np.ones(4))
    into.write(cells[0], "failed", error="no memory")
    into.release(cells)
    ds = lim.open(tmp_path)
    assert ds.status[0, 0].values.tolist() == ["done", "pending"] and ds.error[0, 0, 0] == "" and ds.influence[0, 0, 0, 0] == 1


def test_the_status_is_written_last(tmp_path, monkeypatch):
    into, order = make(tmp_path), []
    put = zarr.Array.__setitem__
    monkeypatch.setattr(zarr.Array, "__setitem__", lambda self, *how: (order.append(self.basename), put(self, *how)))
    into.write((0, 0, 0), "done", influence=np.ones(4), metrics=[1.0, 2.0], theory_error="no")
    assert order[-1] == "status" and sorted(order) == ["error", "influence", "metrics", "status", "theory_error"]


@pytest.mark.parametrize("scheme", ["memory://grids/", "file://"])
def test_any_fsspec_url(tmp_path, scheme):
    path = f"{scheme}{tmp_path}"
    make(path).write((0, 1, 0), "done", influence=np.arange(4.0))
    assert make(path).status()[0, 1, 0] == "done"
    np.testing.assert_array_equal(lim.open(path).influence[0, 1, 0], np.arange(4.0))
    np.testing.assert_array_equal(lim.open(f"{path}/{store.NAME}").influence[0, 1, 0], np.arange(4.0))


def test_no_axis_but_the_seed(tmp_path):
    make(tmp_path, axes={}).write((1,), "done", influence=np.ones(4), theory=np.ones(3), theory_metrics=[2.0], theory_error="")
    ds = lim.open(tmp_path)
    assert ds.influence.dims == ("seed", "position") and ds.theory.dims == ("position",) and ds.influence[1, 0] == 1


def test_a_compact_copy_holds_the_same_in_fewer_files(tmp_path):
    into = make(tmp_path / "a")
    for cell in np.ndindex(2, 2, 2):
        into.write(cell, "done", influence=np.random.rand(4), stderr=np.zeros(4), metrics=[1.0, 2.0])
    store.compact(tmp_path / "a", tmp_path / "b")
    assert lim.open(tmp_path / "a").load().identical(lim.open(tmp_path / "b").load())
    count = lambda name: sum(path.is_file() for path in (tmp_path / name / store.NAME / "influence").rglob("*"))  # noqa: E731
    assert (count("a"), count("b")) == (9, 2)  # with the array's metadata


def test_a_compact_copy_is_neither_written_to_nor_made_over_itself(tmp_path):
    make(tmp_path / "a").write((0, 0, 0), "done", influence=np.ones(4))
    for target in (tmp_path / "a", f"{tmp_path}/a/"):
        with pytest.raises(ValueError, match="is the store itself"):
            store.compact(tmp_path / "a", target)
    store.compact(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="b/grid.zarr: is a compact copy, which only reads"):
        make(tmp_path / "b")
    assert lim.open(tmp_path / "a").influence[0, 0, 0, 0] == lim.open(tmp_path / "b").influence[0, 0, 0, 0] == 1


def test_remove_leaves_nothing_to_resume(tmp_path):
    make(tmp_path).write((0, 0, 0), "done")
    store.remove(tmp_path)
    store.remove(tmp_path / "nowhere")
    assert (make(tmp_path, grid={}).status() == "pending").all()


@pytest.mark.parametrize("file, content", [("zarr.json", "[" * 100_000), ("status/zarr.json", "{"), ("zarr.json", ""), ("layers/zarr.json", "{}")])
def test_a_damaged_store_is_refused_by_name(tmp_path, file, content):
    make(tmp_path)
    (tmp_path / store.NAME / file).write_text(content)
    with pytest.raises(ValueError, match="cannot be read, it is damaged") as refusal:
        lim.open(tmp_path).status.load()
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("grid", [3.5, "text", None])
def test_a_store_of_something_that_is_no_grid_is_refused_by_name(tmp_path, grid):
    make(tmp_path)
    zarr.open_group(tmp_path / store.NAME, mode="r+").attrs["grid"] = grid
    with pytest.raises(ValueError, match=f"{store.NAME}: cannot be read, it is damaged"):
        make(tmp_path)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make("~/grid")
    assert (tmp_path / "grid" / store.NAME).is_dir() and lim.open("~/grid").sizes["seed"] == lim.open(tmp_path / "grid").sizes["seed"] == 2
