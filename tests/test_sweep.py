"""A grid's cells are what `lim.influence` gives one at a time, whatever ran beside them, and survive what happens."""

import dataclasses
import errno
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import kill_and_resume
import numpy as np
import pytest
import xarray as xr
import zarr

import lim
from lim import sweep
from lim.influence import Influence
from lim.theory import kernel, paper

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = lim.Config.preset("small").replace(layers=1, width=16)
# the stream's Jacobian at residual 1e10 is 1e20, which overflows float32 when it is pulled back 2^64 times enlarged
GRID = sweep.Grid(CONFIG, {"length": {"6": 6, "8": 8}, "residual": {"on": 1.0, "0.5": 0.5, "1e10": 1e10}}, (3, 0), output="stream",
                  probes=5)  # fmt: skip


def finish(grid, path, **how):
    return list(sweep.run(grid, grid.store(path), **how)), lim.open(path).load()


@pytest.fixture(scope="module")
def grid_run(tmp_path_factory):
    """The grid, run once: its outcomes, its dataset and how often its measurement was compiled."""
    compiled = []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())
    logger = logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    with jax.log_compiles():
        outcomes, ds = finish(GRID, tmp_path_factory.mktemp("grid"))
    logger.removeHandler(handler)
    return outcomes, ds, sum("_moments" in line and line.startswith("Finished XLA compilation") for line in compiled)


def assert_agree(influence, stderr, expected, expected_stderr):
    """Equal but for some 60 roundings of float32 sums in another order."""
    np.testing.assert_allclose(influence, expected, rtol=4e-6)
    # where the Jacobian is a multiple of the identity all probes agree, and what is left is rounding of the influence
    assert np.all(np.abs(np.asarray(stderr) - expected_stderr) <= 1e-4 * np.asarray(expected_stderr) + 1e-6 * np.asarray(expected))


def test_one_compilation_a_shape(grid_run):
    outcomes, ds, compilations = grid_run
    assert compilations == 2 and len(outcomes) == 12


def test_cells_are_what_influence_gives_alone(grid_run):
    _, ds, _ = grid_run
    for c in GRID.configurations:
        for s, seed in enumerate(GRID.seeds):
            decoder = lim.Decoder.at_birth(c.config, seed)
            expected = lim.influence(decoder, lim.random_tokens(CONFIG.vocab, c.length, seed), c.switches, output="stream", probes=5, seed=seed)
            cell = ds.isel({**dict(zip(GRID.axes, c.place)), "seed": s})
            assert_agree(cell.influence[: c.length], cell.stderr[: c.length], expected.influence_L, expected.stderr_L)
            assert np.isnan(cell.influence[c.length :]).all()
            summary = lim.summarize(cell.influence.values[: c.length])
            assert cell.metrics.sel(metric="primacy") == summary.primacy and cell.metrics.sel(metric="valley") == summary.valley
            assert cell.metrics.sel(metric="seconds") > 0 and cell.status == "done"


def test_theory_stands_beside_each_configuration(grid_run):
    _, ds, _ = grid_run
    for c in GRID.configurations:
        cell = ds.isel(dict(zip(GRID.axes, c.place)))
        np.testing.assert_allclose(cell.operator[: c.length], paper.predict(c.config, c.length, c.switches), rtol=1e-12)
        theory = kernel.predict(c.config, c.length, c.switches, output="stream")
        np.testing.assert_allclose(cell.theory[: c.length], theory.influence_L * np.sqrt(1 + theory.bias), rtol=1e-12)
        assert cell.theory_metrics.sel(theory_metric="cv") == theory.cv and cell.theory_error == ""


def test_numbers_do_not_depend_on_the_batch(grid_run, tmp_path):
    _, ds, _ = grid_run
    one = sweep.Grid(CONFIG, {"length": {"8": 8}, "residual": {"0.5": 0.5}}, (0,), output="stream", probes=5)
    _, alone = finish(one, tmp_path)
    there = ds.sel(length=8, residual="0.5", seed=0)
    assert np.array_equal(alone.influence.squeeze(), there.influence) and np.array_equal(alone.stderr.squeeze(), there.stderr)


DEVICES = """
import sys, jax, lim
from lim import sweep
assert jax.local_device_count() == 4
config = lim.Config.preset("small").replace(layers=1, width=16)
grid = sweep.Grid(config, {"length": {"8": 8}, "residual": {"on": 1.0, "0.5": 0.5, "1e10": 1e10}}, (3, 0), output="stream", probes=5)
assert len(list(sweep.run(grid, grid.store(sys.argv[1]), batch=5))) == 6
"""


def test_numbers_do_not_depend_on_the_devices(grid_run, tmp_path):
    flags = "--xla_force_host_platform_device_count=4"
    subprocess.run([sys.executable, "-c", DEVICES, str(tmp_path)], check=True, env=dict(os.environ, PYTHONPATH=str(ROOT), XLA_FLAGS=flags))
    there, here = lim.open(tmp_path).load().sel(length=8), grid_run[1].sel(length=8)
    assert (there.status == "done").all()
    assert_agree(there.influence, there.stderr, here.influence, here.stderr)  # each has threads of its own, and sums in another order


def test_kills_lose_nothing(tmp_path):
    print(kill_and_resume.main(kills=2, seeds=2, scratch=tmp_path))


# --- without compiling: a runner that answers by rule -----------------------------------------------------------------

SMALL = sweep.Grid(CONFIG, {"layers": {"1": 1, "2": 2}, "rope": {"on": 1.0, "off": 0.0}}, (0, 1, 2), length=8)


@pytest.fixture
def rule(monkeypatch):
    """What the runner answers: a function of (configuration, index of the seed)."""
    rules = dict(now=lambda c, s: Influence(np.full(c.length, 1.0 + s), np.zeros(c.length), 16, True, 16))

    class Runner:
        size, compiling = 4, 0.0

        def __init__(self, *_):
            pass

        def __call__(self, cells):
            return [rules["now"](*cell) for cell in cells]

    monkeypatch.setattr(sweep, "_Runner", Runner)
    return rules


def test_a_cell_that_is_not_finite_or_raises_fails_and_the_rest_goes_on(rule, tmp_path):
    plain = rule["now"]

    def some_bad(c, s):
        if (c.labels["rope"], s) == ("off", 1):
            return Influence(np.array([1.0, np.nan] * 4), np.zeros(8), 16, True, 16)
        return "XlaRuntimeError: out of memory" if (c.labels["layers"], s) == ("2", 2) else plain(c, s)

    rule["now"] = some_bad
    outcomes, ds = finish(SMALL, tmp_path)
    assert len(outcomes) == 12 and sum(o.status == "failed" for o in outcomes) == 4
    assert (ds.status.sel(rope="off", seed=1) == "failed").all() and (ds.status == "failed").sum() == 4
    assert (ds.error.sel(rope="off", seed=1) == "influence is not finite at 4 of 8 positions").all()
    assert (ds.error.sel(layers=2, seed=2) == "XlaRuntimeError: out of memory").all()
    assert np.isnan(ds.influence.sel(rope="off", seed=1)).all() and np.isfinite(ds.influence).sum() == 8 * 8
    assert finish(SMALL, tmp_path)[0] == []
    rule["now"] = plain
    outcomes, ds = finish(SMALL, tmp_path, retry_failed=True)
    assert len(outcomes) == 4 and (ds.status == "done").all() and (ds.error == "").all()


def test_a_full_disk_stops_the_run_and_keeps_what_is_done(rule, tmp_path, monkeypatch):
    into, write = SMALL.store(tmp_path), lim.store.Store.write

    def full(self, cell, *rest, **values):
        if cell == (0, 1, 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, cell, *rest, **values)

    monkeypatch.setattr(lim.store.Store, "write", full)
    with pytest.raises(OSError, match="No space"):
        list(sweep.run(SMALL, into))
    assert (into.status() == "done").sum() == 3 and (into.status() == "pending").sum() == 9
    monkeypatch.undo()


def test_an_interrupted_batch_is_dropped(rule, tmp_path):
    into, plain = SMALL.store(tmp_path), rule["now"]

    def interrupted(c, s):
        if s == 2:
            raise KeyboardInterrupt
        return plain(c, s)

    rule["now"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(sweep.run(SMALL, into))
    assert (into.status() == "done").sum() == 4 and (into.status() == "pending").sum() == 8
    rule["now"] = plain
    assert len(list(sweep.run(SMALL, into))) == 8


def test_shards_are_all_and_do_not_overlap(rule, tmp_path):
    cells = [o.cell for i in range(5) for o in sweep.run(SMALL, SMALL.store(tmp_path / str(i)), shard=(i, 5))]
    assert sorted(cells) == sorted(np.ndindex(SMALL.shape))


def test_a_grid_comes_back_from_its_store(tmp_path):
    axes = {"model": {"small": lim.Config.preset("small"), "gpt2": lim.Config.preset("gpt2")}, "mlp": {"off": 0.0}}
    grid = sweep.Grid(CONFIG, axes, (0, 1), length=12, source=0, probes=None)
    grid.store(tmp_path)
    assert sweep.Grid.from_spec(lim.open(tmp_path).attrs["grid"]) == grid


def test_text_is_read_window_by_window():
    ids = np.arange(40, dtype=np.int32)
    grid = sweep.Grid(CONFIG, {"tokens": {"random": None, "book": ids}}, (0, 1, 2), length=8)
    random, text = grid.configurations
    assert random.tokens_WL is None
    np.testing.assert_array_equal(text.tokens_WL, [ids[:8], ids[32:], ids[16:24]])
    other = sweep.Grid(CONFIG, {"tokens": {"random": None, "book": ids + 1}}, (0, 1, 2), length=8)
    assert json.dumps(other.spec()) != json.dumps(grid.spec())


def test_a_seed_reads_a_window_of_its_own():
    """Whatever other seeds there are; none overlaps another while the text has room, and all its windows come before one comes again."""
    ids = np.arange(83)
    order = [int(sweep.window(ids, 8, seed)[0]) for seed in range(10)]
    assert order == [0, 66, 33, 16, 50, 8, 75, 41, 25, 58]  # of ten 0, 8, 4, 2, 6, 1, 9, 5, 3, 7
    assert len({number for seed in range(10) for number in sweep.window(ids, 8, seed)}) == 80
    np.testing.assert_array_equal(sweep.window(ids, 8, 13), sweep.window(ids, 8, 3))
    np.testing.assert_array_equal(sweep.window(ids[:9], 8, 5), ids[:8])
    text = {"tokens": {"book": ids.astype(np.int32)}}
    few, more = (sweep.Grid(CONFIG, text, seeds, length=8).configurations[0].tokens_WL for seeds in ((0, 1, 2), (3, 1)))
    np.testing.assert_array_equal(more[1], few[1])
    assert not {*more[0]} & {*few.ravel()}


def test_a_store_of_text_whose_windows_went_by_place_opens_but_does_not_go_on(tmp_path):
    grid = sweep.Grid(CONFIG, {"tokens": {"book": np.arange(40, dtype=np.int32)}}, (0, 1), length=8)
    grid.store(tmp_path)
    older = zarr.open_group(tmp_path / "grid.zarr", mode="r+")
    older.attrs["grid"] = {name: value for name, value in older.attrs["grid"].items() if name != "windows"}
    assert sweep.Grid.from_spec(lim.open(tmp_path).attrs["grid"]).shape == grid.shape
    with pytest.raises(ValueError, match="windows is not given there, by seed here$"):
        grid.store(tmp_path)
    assert "windows" not in GRID.spec()  # nothing else has changed


def test_stores_of_more_seeds_come_together_as_the_page_says(rule, tmp_path, monkeypatch):
    """On text theory is of a store's own windows, and must go first; the rest is that of one store of all seeds."""
    rule["now"] = lambda c, s: Influence(1.0 + c.tokens_WL[s], np.zeros(c.length), 16, True, 16)
    text = {"tokens": {"book": np.random.default_rng(0).integers(0, 5, 84).astype(np.int32)}}
    for name, seeds in (("grid", (0, 1, 2)), ("more", (3, 4)), ("all", (0, 1, 2, 3, 4))):
        finish(sweep.Grid(CONFIG, text, seeds, length=8), tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall("```python\n(.*?)```", (ROOT / "docs" / "reading-the-store.md").read_text(encoding="utf-8"), re.S)
    plain, dropping = (next(block for block in blocks if words in block) for words in ('compat="equals"', "drop_vars"))
    with pytest.raises(xr.MergeError, match="theory"):
        exec(plain, {"lim": lim})
    names = {"lim": lim, "xr": xr}
    exec(dropping, names)
    xr.testing.assert_equal(names["both"].influence, lim.open("runs/all").influence.load())


def test_what_is_below_float32_fails(rule, tmp_path):
    rule["now"] = lambda c, s: Influence(np.zeros(c.length) + (s == 1) * np.eye(c.length)[-1], np.zeros(c.length), 16, True, 16)
    _, ds = finish(SMALL, tmp_path)
    assert (ds.status.sel(seed=[0, 2]) == "failed").all() and (ds.status.sel(seed=1) == "done").all()
    assert (ds.error.sel(seed=0) == "influence is zero everywhere: below float32's reach").all()


def test_a_theory_without_memory_does_not_take_the_measurement_along(rule, tmp_path, monkeypatch):
    def no_memory(*_, **__):
        raise MemoryError

    monkeypatch.setattr(kernel, "predict", no_memory)
    _, ds = finish(SMALL, tmp_path / "raised")
    assert (ds.status == "done").all() and (ds.theory_error == "length=8: the kernel theory ran out of memory").all()
    assert np.isfinite(ds.influence).all() and np.isfinite(ds.operator).all()
    begun = []
    monkeypatch.setattr(kernel, "predict", lambda *_, **__: begun.append(1))
    monkeypatch.setattr(sweep.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=8 * 64 * 18 - 1))  # of one layer 17 matrices
    errors = [sweep.predict(SMALL, c).get("theory_error") for c in SMALL.configurations if c.config.layers == 2]
    assert errors == ["length=8: the kernel theory needs about 9.2e-06 GB of memory, 9.2e-06 GB are free"] * 2 and not begun


def test_cells_side_by_side_and_after_a_failed_batch_are_what_they_are_alone(grid_run, tmp_path, monkeypatch):
    """As on an accelerator: two cells at once, four a batch; and one at a time, once a batch has failed."""
    _, ds, _ = grid_run
    monkeypatch.setattr(sweep, "_batching", lambda *_: (2, 4))
    one = dataclasses.replace(GRID, axes={"length": {"8": 8}, "residual": GRID.axes["residual"]})
    _, together = finish(one, tmp_path / "together")
    measure, sizes = sweep._Runner._measure, []

    def fails_together(self, cells):
        sizes.append(len(cells))
        if len(cells) > 1:
            raise RuntimeError("out of memory")
        return measure(self, cells)

    monkeypatch.setattr(sweep._Runner, "_measure", fails_together)
    _, apart = finish(one, tmp_path / "apart")
    assert sizes == [4] + 6 * [1]
    there = ds.sel(length=[8])
    for found in (together, apart):
        assert (found.status == "done").all()
        assert_agree(found.influence, found.stderr, there.influence, there.stderr)


def test_cells_on_text_are_what_influence_gives_of_their_windows(tmp_path):
    ids = np.frombuffer(b"the quick brown fox jumps over the lazy dog, and the dog sleeps", np.uint8).astype(np.int32)
    grid = sweep.Grid(CONFIG, {"tokens": {"book": ids}}, (0, 5), length=12)
    _, ds = finish(grid, tmp_path)
    theories = []
    for seed in grid.seeds:
        window_L = sweep.window(ids, 12, seed)
        expected = lim.influence(lim.Decoder.at_birth(CONFIG, seed), window_L)
        np.testing.assert_allclose(ds.influence.sel(seed=seed).squeeze(), expected.influence_L, rtol=4e-6)
        theories.append(kernel.predict(CONFIG, 12, tokens=window_L).finite_width_L)
    np.testing.assert_allclose(ds.theory.squeeze(), lim.rms(theories), rtol=1e-12)


@pytest.mark.parametrize("how, message", [
    (dict(axes={"heads": {"2": 2}}), "axis heads: allowed are model, tokens, layers"),
    (dict(seeds=()), "at least one"),
    (dict(seeds=(1, 1)), "none of them twice"),
    (dict(seeds=(0, 2**32)), "seed=4294967296: must be an integer from 0 to 4294967295"),
    (dict(output="loss"), "output='loss': allowed are hidden, stream, logits, top_probability"),
    (dict(source=1), "source=1: allowed are 0 to 0"),
    (dict(probes=17), "probes=17: allowed are 2 to 16, the entries of hidden"),
    (dict(axes={"residual": {"1": 1.0}, "alpha": {"0.5": 0.5}}), "residual and alpha both"),
    (dict(axes={"tokens": {"book": np.arange(9000)}}), "tokens=book: holds the id 8999, this model ends at 4095"),
    (dict(axes={"tokens": {"book": np.arange(-1, 90)}}), "tokens=book: must hold integers of at least 0"),
    (dict(axes={"tokens": {"book": np.arange(90) / 2}}), "tokens=book: must hold integers of at least 0"),
    (dict(axes={"residual": {"each": [1.0]}}), "axis residual: must hold one number per value, not one per layer"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        sweep.Grid(**{**dict(config=CONFIG, axes={}, seeds=(0,), length=8), **how})


def test_parts_and_batches_that_cannot_be_are_refused(tmp_path):
    store = GRID.store(tmp_path)
    for how, message in ((dict(shard=(5, 5)), r"shard=\(5, 5\)"), (dict(shard=(-1, 5)), "shard="), (dict(batch=0), "batch=0: must be at least 1")):
        with pytest.raises(ValueError, match=message):
            list(sweep.run(GRID, store, **how))


def test_theory_knows_which_random_tokens_repeat():
    """More positions than tokens: they are drawn with repeats, as the cells read them."""
    grid = sweep.Grid(CONFIG.replace(vocab=3), {}, (0, 1), length=8)
    each = [kernel.predict(grid.config, 8, tokens=lim.random_tokens(3, 8, seed)).finite_width_L for seed in (0, 1)]
    found_L = sweep.predict(grid, grid.configurations[0])["theory"]
    np.testing.assert_allclose(found_L, np.sqrt(np.mean(np.square(each), axis=0)), rtol=1e-12)
    assert abs(found_L / kernel.predict(grid.config, 8).finite_width_L - 1).max() > 0.01


def test_theory_that_is_not_finite_is_left_out_with_its_reason(monkeypatch):
    """And does not stop the grid."""
    sound = kernel.predict
    monkeypatch.setattr(kernel, "predict", lambda *a, **k: dataclasses.replace(sound(*a, **k), bias=float("nan")))
    values = sweep.predict(GRID, GRID.configurations[0])
    assert "theory" not in values and "nan" in values["theory_error"] and np.isfinite(values["operator"]).all()


@pytest.mark.parametrize("probes", [1, 2.5, "many", True, 10**6])
def test_probes_that_cannot_be_are_refused(probes):
    with pytest.raises(ValueError, match="probes=.*: allowed are 2 to"):
        sweep.Grid(CONFIG, {}, (0,), length=8, probes=probes).configurations
