"""The command lines: bad input ends in one line and status 2 before any work; good input writes the library's numbers."""

import csv
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import types

import kill_training
import numpy as np
import pytest
import stand_ins
import zarr

import lim
from experiments import ablate, bench, cli, measure
from lim import profile, rollout, sweep
from lim.theory import paper

ROOT = pathlib.Path(__file__).resolve().parent.parent
DRIVER = """
import contextlib, io, json, sys
from absl import flags
from absl.testing import flagsaver
from experiments import cli, {name} as command
command.define_flags()
outcomes = []
for words in json.load(sys.stdin):
    sys.argv = ["{name}.py", *words]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.run(command.main)
        except SystemExit as end:
            code = end.code or 0
    outcomes.append([code, out.getvalue(), err.getvalue()])
    flags.FLAGS.unparse_flags()
json.dump(outcomes, sys.stdout)
"""


def run(name, command_lines, cwd):
    """[status, stdout, stderr] of each command line, in one process."""
    done = subprocess.run([sys.executable, "-c", DRIVER.format(name=name)], input=json.dumps(command_lines), cwd=cwd,
                          env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(cwd), "HF_HUB_OFFLINE": "1"},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BAD_ABLATE = [
    ("--rope=maybe", "--rope=maybe: 'maybe': allowed are on, off or a number of at least 0"),
    ("--rope=on,1", "--rope=on,1: 1 stands twice (the same value)"),
    ("--rope=on,,off", "--rope=on,,off: '': allowed are on, off or a number"),
    ("--rope=nan", "--rope=nan: 'nan': allowed are"),
    ("--residual=-1", "--residual=-1: '-1': allowed are on, off or a number of at least 0"),
    ("--causal=2", "--causal=2: '2': allowed are on, off or a number from 0 to 1"),
    ("--window=0", "--window=0: '0': allowed are off or a whole number of at least 1"),
    ("--window=on", "--window=on: 'on': allowed are off or a whole number of at least 1"),
    ("--prefix=1.5", "--prefix=1.5: '1.5': allowed are off or a whole number of at least 0"),
    ("--alpha=on", "--alpha=on: 'on': allowed are off or a number from 0 to 1"),
    ("--alpha=0.5 --residual=0.5", "residual and alpha both set the weight of the skip"),
    ("--positions=on", "positions=1.0: qwen2 has none, so only off"),
    ("--model=gpt2 --rope=on", "rope=1.0: gpt2 has none, so only off"),
    ("--model=gpt9", "--model=gpt9: model='gpt9': allowed are small, gpt2"),
    ("--model=.", "cannot be read as a config.json"),
    ("--seed=4294967296", "--seed=4294967296: '4294967296': allowed are integers of at least 0, at most 4294967295"),
    ("--seed=4294967295 --seeds=2", "--seed=4294967295, --seeds=2: the last seed is 4294967296, allowed is at most 4294967295"),
    ("--layers=0", "--layers=0: '0': allowed are integers of at least 1"),
    ("--layers=two", "--layers=two: 'two': allowed are integers"),
    ("--width=100", "width=100: must be a multiple of"),
    ("--length=1", "--length=1: '1': allowed are integers of at least 2"),
    ("--seeds=0", "--seeds=0: '0': allowed are integers of at least 1"),
    ("--probes=1", "--probes=1: '1': allowed are integers of at least 2"),
    ("--probes=129", "probes=129: allowed are 2 to 128, the entries of hidden"),
    ("--probes=4 --exact", "--exact, --probes: give one of them"),
    ("--source=6", "source=6: allowed are 0 to 5"),
    ("--output=gradient", "--output=gradient"),
    ("--out=file/below", "--out=file/below: cannot be written"),
    ("--rows=rope", "--rows=rope: is not an axis of this grid: it has none"),
    ("--rope=on,off --layers=1,2 --rows=rope --cols=rope", "--rows=rope, --cols=rope: must be two axes"),
    ("--model=small,gpt9", "--model=small,gpt9: model='gpt9': allowed are small, gpt2"),
    ("--tokens=nowhere.txt", "--tokens=nowhere.txt: nowhere.txt: cannot be read"),
    ("--tokens=file", "--tokens=file: file: holds no text"),
    ("--tokens=short.txt", "length=256: the text has only 6 tokens"),
    ("--shard=8/8", "--shard=8/8: '8/8': allowed is i/n with i from 0 to n-1, as in 0/8 to 7/8"),
    ("--shard=1", "--shard=1: '1': allowed is i/n"),
    ("--shard=0/2 --distributed", "--shard, --distributed: give one of them"),
    ("--shard=0/2 --noresume", "--noresume: replaces the store, which one of several workers must not do"),
    ("--distributed --coordinator=host:1", "--processes, --process: --coordinator, --processes and --process go together"),
    ("--distributed --coordinator=host --processes=2 --process=0", "--coordinator=host: allowed is HOST:PORT"),
    ("--distributed --coordinator=host:1 --processes=2 --process=2", "--process=2: allowed are 0 to 1"),
    ("--processes=2", "--processes: is for --distributed"),
    ("--batch=0", "--batch=0: '0': allowed are integers of at least 1"),
    ("--resume=maybe", "--resume"),
    ("--retry-failed=maybe", "--retry_failed"),
    ("--plot-only=nowhere", "nowhere/grid.zarr: is not there, or holds no grid of lim's"),
    ("--plot-only=nowhere --rope=off", "--plot_only=nowhere: draws what the store holds; leave out --rope"),
    ("--out=other", "--out=other: holds another grid: layers is 3 there, not given here; seeds is 7 there, 0,1,2,3 here"),
    ("--out=newer", "newer/grid.zarr: was written by a newer lim (schema 99; this one reads up to 1)"),
    ("--plot-only=newer", "newer/grid.zarr: was written by a newer lim (schema 99; this one reads up to 1)"),
    ("--rope=off --rope=on", "--rope stands twice"),
    ("--rope=off -rope=on", "--rope stands twice"),
    ("--resume --noresume", "--resume stands twice"),
    ("--noexact=2", "--noexact=2 does not take an argument"),
    ("--flagfile=latin", "--flagfile: is not UTF-8 text (invalid start byte at byte 0)"),
    ("--rope=\x1b[31m\u202e", r"--rope=\x1b[31m\u202e: "),
    ("--ropes=off", "Unknown command line flag 'ropes'"),
    ("rope=off", "'rope=off' is no flag"),
]
BAD_MEASURE = [
    ("--weights=nowhere", "nowhere"),
    ("--weights=pickled", "pytorch_model.bin"),
    ("--tokens=nowhere.txt", "nowhere.txt: cannot be read"),
    ("--tokens=file", "file: holds no text"),
    ("--length=10000000", "length=10000000: the text has only"),
    ("--residual=1e300", "--residual=1e300: '1e300': allowed are on, off or a number of at least 0, at most 3.4e+38"),
    ("--windows=0", "--windows=0: '0': allowed are integers of at least 1"),
    ("--seed=99999999999999999999", "allowed are integers of at least 0, at most 4294967295"),
    ("--seed=4294967295 --windows=2", "--seed=4294967295, --windows=2: the last seed is 4294967296"),
    ("--compare=trained", "--compare=trained"),
    ("--rope=on,off", "--rope=on,off: 'on,off': allowed are"),
    ("--source=-1", "--source=-1: '-1': allowed are integers of at least 0"),
    ("--source=1 --rollout", "--source=1, --rollout: the rollout starts at the embedding"),
    ("--out=gs://bucket/x", "--out=gs://bucket/x: must be a folder on this machine; experiments.ablate alone writes to URLs"),
]
BAD_BENCH = [
    ("--models=gpt9", "model='gpt9': allowed are small"),
    ("--models=small,small", "small stands twice"),
    ("--lengths=1", "--lengths=1: '1': allowed are integers of at least 2"),
    ("--probes=1", "--probes=1: '1': allowed are integers of at least 2"),
    ("--repeats=0", "--repeats=0: '0': allowed are integers of at least 1"),
    ("--device=npu", "--device=npu"),
    ("--contender=tensorflow", "--contender=tensorflow"),
    ("--contender=lim", "--contender=lim: needs one of --models and one of --lengths"),
    ("--scaling=8,16 --training=2", "--scaling: is of influence, of one model"),
    ("--scaling=8,16 --lengths=8", "--scaling: is of influence, of one model"),
    ("--out=gs://bucket/x", "--out=gs://bucket/x: must be a folder on this machine; experiments.ablate alone writes to URLs"),
    ("--out=file/below", "--out=file/below: cannot be written"),
]
BAD_RECALL = [
    ("--pairs=2", "--pairs=2: '2': allowed are integers of at least 3"),
    ("--out=gs://bucket/x", "--out=gs://bucket/x: must be a folder on this machine; experiments.ablate alone writes to URLs"),
    ("--pairs=4 --questions=5", "questions=5: must be an integer of at least 1, at most 4 (pairs)"),
    ("--pairs=17 --keys=16", "keys=16: must be an integer of at least 17 (pairs)"),
    ("--width=100", "width=100: must be a multiple of 64"),
    ("--steps=0", "--steps=0: '0': allowed are integers of at least 1"),
    ("--learning-rate=nan", "--learning_rate=nan: 'nan': allowed are numbers of at least 0"),
    ("--intervention=prayer", "--intervention=prayer"),
    ("--compare --intervention=skip", "--compare, --intervention: give one of them"),
    ("--compare --seeds=1", "--seeds=1: '1': allowed are integers of at least 2"),
    ("--compare --shard=2/2", "--shard=2/2: '2/2': allowed is i/n"),
    ("--seeds=3", "--seeds: is for --compare"),
    ("--shard=0/2", "--shard: is for --compare"),
    ("--seed=4294967296", "--seed=4294967296: '4294967296': allowed are integers of at least 0, at most 4294967295"),
    ("--form=uuids", "--form: is for --weights only"),
    ("--places=5 --probes=3", "--places, --probes: are for --weights only"),
    ("--weights=nowhere --steps=5 --compare", "--steps, --compare: not with --weights"),
    ("--weights=nowhere --places=101", "--places=101: allowed are 2 to 100, the pairs"),
    ("--weights=nowhere --contexts=2", "--profiles=3: allowed are 1 to 2, the contexts"),
    ("--weights=nowhere", "nowhere"),
    ("--weights=pickled", "pytorch_model.bin"),
    ("--out=file/below", "--out=file/below: cannot be written"),
    ("--compare --out=damaged", "damaged/none/seed0/result.json is damaged (UnicodeDecodeError)"),
    ("--compare --out=huge", "huge/none/seed0/result.json is damaged (OverflowError)"),
    ("--compare --out=strange", "strange/none/seed0/result.json holds the result of another training"),
]

BAD_TRAIN = [
    ("--steps=0", "--steps=0: '0': allowed are integers of at least 1"),
    ("--out=gs://bucket/x", "--out=gs://bucket/x: must be a folder on this machine; experiments.ablate alone writes to URLs"),
    ("--learning_rate=-1", "--learning_rate=-1: '-1': allowed are numbers of at least 0"),
    ("--clip=0", "clip=0.0: must be a number above 0, or inf for none"),
    ("--seed=4294967296", "seed=4294967296: must be at most 4294967295"),
    ("--weights=pickled --out=./pickled --noresume", "--weights=pickled, --out=./pickled: are one folder"),
    ("--warmup=2", "--warmup=2: '2': allowed are numbers of at least 0, at most 1"),
    ("--batch=3 --accumulate=2", "accumulate=2: must divide batch=3"),
    ("--model=gpt9", "model='gpt9': allowed are small"),
    ("--rope=maybe", "--rope=maybe: 'maybe': allowed are on, off or a number"),
    ("--alpha=0.5 --residual=0.5", "residual and alpha both set the weight of the skip"),
    ("--measurements=1", "--measurements=1: '1': allowed are integers of at least 2"),
    ("--probes=129", "--probes=129: allowed are 2 to 128, the width"),
    ("--measure_at=401", "--measure_at=401: allowed are 0 to 400, the steps"),
    ("--weights=nowhere", "nowhere"),
    ("--weights=pickled --layers=2", "--layers: --weights has a config of its own"),
    ("--text=nowhere.txt", "nowhere.txt: cannot be read"),
    ("--text=,", "--text=,: holds an empty name"),
    ("--text=short.txt", "--text=short.txt: one document cannot be parted"),
    ("--text=short.txt,short.txt", "length=256, batch=8: a text of 7 tokens has 0 windows"),
    ("--tokenizer=nowhere --text=short.txt,short.txt", "tokenizer=nowhere"),
    ("--windows=100000", "windows=100000: the held-out text of"),
    ("--out=file/below", "--out=file/below: cannot be written"),
    ("--out=logged", "logged/metrics.jsonl: is damaged (IsADirectoryError); remove it, and the log begins anew"),
    ("--out=flipped", "flipped/metrics.jsonl: is damaged (UnicodeDecodeError)"),
    ("--out=listed", "listed/metrics.jsonl: is damaged (TypeError)"),
]


BAD_LADDER = [
    ("--out=gs://bucket/x", "--out=gs://bucket/x: must be a folder on this machine; experiments.ablate alone writes to URLs"),
    ("--width=100", "width=100: must be a multiple of 64"),
    ("--probes=1000", "--probes=1000: allowed are 2 to 128, the smallest width"),
]
BAD_DEPTH = [
    ("--out=gs://bucket/x", "--out=gs://bucket/x: must be a folder on this machine; experiments.ablate alone writes to URLs"),
    ("--layers=0", "--layers=0: '0': allowed are integers of at least 1"),
]


BAD = dict(ablate=BAD_ABLATE, measure=BAD_MEASURE, bench=BAD_BENCH, train=BAD_TRAIN, recall=BAD_RECALL, ladder=BAD_LADDER, depth=BAD_DEPTH)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(name, tmp_path):
    cases = BAD[name]
    (tmp_path / "file").touch()
    (tmp_path / "short.txt").write_text("short\n")
    (tmp_path / "latin").write_bytes(b"\xff")
    small = lim.Config.preset("small")
    sweep.Grid(small, {"layers": {"3": 3}}, (7,)).store(tmp_path / "other")
    sweep.Grid(small, {}, (0,)).store(tmp_path / "newer")
    zarr.open_group(tmp_path / "newer" / "grid.zarr", mode="r+").attrs["schema"] = 99
    (tmp_path / "strange" / "none" / "seed0").mkdir(parents=True)
    (tmp_path / "damaged" / "none" / "seed0").mkdir(parents=True)
    (tmp_path / "huge" / "none" / "seed0").mkdir(parents=True)
    (tmp_path / "huge" / "none" / "seed0" / "result.json").write_text('{"about": 1, "curve": {"count": [1%s]}}' % (400 * "0"))
    (tmp_path / "damaged" / "none" / "seed0" / "result.json").write_bytes(b"\xff{}")
    (tmp_path / "strange" / "none" / "seed0" / "result.json").write_text('{"about": 1, "curve": {}}')
    (tmp_path / "logged" / "metrics.jsonl").mkdir(parents=True)
    for folder, log in (("flipped", b'{"step": 1, "los\xa2": 2}\n'), ("listed", b"[1]\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "metrics.jsonl").write_bytes(log)
    (tmp_path / "pickled").mkdir()
    lim_config = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8,
                      vocab_size=300, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4)  # fmt: skip
    (tmp_path / "pickled" / "config.json").write_text(json.dumps(lim_config))
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    outcomes = run(name, [words.split() for words, _ in cases], tmp_path)
    for (words, message), (code, out, err) in zip(cases, outcomes):
        assert (code, out) == (2, ""), (words, code, out, err)
        assert err.count("\n") == 1 and err.startswith(f"experiments.{name}: ") and message in err and err[:-1].isprintable(), (words, err)


def rows_of(out, title):
    """The rows of the printed table whose first line contains `title`: column → text."""
    lines = out[out.index(title) :].splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("─"))
    columns = [match.span() for match in re.finditer("─+", lines[rule])]
    read = lambda line: [line[begin:end].strip() for begin, end in columns]  # noqa: E731
    end = next(i for i in range(rule + 1, len(lines)) if not lines[i].strip() or len(lines[i]) != len(lines[rule]))
    return [dict(zip(read(lines[rule - 1]), read(line))) for line in lines[rule + 1 : end]]


TINY = "--layers=2 --width=32 --length=12 --seeds=3"


def test_ablate_writes_the_librarys_numbers(tmp_path):
    line = f"{TINY} --rope=off --residual=on,0.5,1e30 --out=here".split()
    again = [*line, "--retry-failed"]
    runs = run("ablate", [line, line, again, ["--plot-only", "here", "--out=drawn", "--rows=residual"]], tmp_path)
    (code, out, err), (code_again, out_again, err_again), (code_retry, *_), (code_drawn, out_drawn, err_drawn) = runs
    # residual 1e30 overflows float32: its cells fail, the others do not
    assert (code, code_again, code_retry, code_drawn) == (3, 3, 3, 0), (err, err_drawn)
    for text in (err, err_again, err_drawn):
        failed = [line for line in text.splitlines() if line.startswith("failed: ")]
        assert [line.split("seed=")[1] for line in failed] == [f"{s}: influence is not finite at 12 of 12 positions" for s in range(3)]
        assert all("residual=1e30" in line for line in failed) and "3 of 9 cells failed; --retry-failed runs them again" in text
    assert out_again == out and out_drawn.splitlines()[:5] == out.splitlines()[:5]
    for name in ("influence.png", "bundle.png"):
        assert (tmp_path / "here" / name).stat().st_size > 10_000 and (tmp_path / "drawn" / name).stat().st_size > 10_000
    ds = lim.open(tmp_path / "here").load()
    assert ds.attrs["flags"]["residual"] == "on,0.5,1e30" and ds.attrs["flags"]["seeds"] == 3
    assert ds.attrs["provenance"]["command"] == "python -m experiments.ablate " + " ".join(line)
    config = lim.Config.preset("small").replace(layers=2, width=32)
    rows = list(csv.DictReader((tmp_path / "here" / "summary.csv").open()))
    assert [row["residual"] for row in rows] == ["on", "0.5"]
    for row, residual in zip(rows, (1.0, 0.5)):
        cells = ds.sel(rope="off", residual=row["residual"], layers=2, width=32, length=12)
        for seed in range(3):
            expected = lim.influence(lim.Decoder.at_birth(config, seed), lim.random_tokens(config.vocab, 12, seed),
                                     lim.Switches(rope=0.0, residual=residual))  # fmt: skip
            np.testing.assert_allclose(cells.influence.sel(seed=seed), expected.influence_L, rtol=4e-6)
        theory = lim.theory.kernel.predict(config, 12, lim.Switches(rope=0.0, residual=residual))
        np.testing.assert_allclose(cells.theory, theory.finite_width_L, rtol=1e-12)
        summary = profile.summarize_seeds(cells.influence.values)
        assert float(row["primacy"]) == pytest.approx(summary.primacy) and float(row["primacy_se"]) == pytest.approx(summary.primacy_se)
        assert float(row["theory_log_max"]) == pytest.approx(lim.compare(lim.rms(cells.influence.values), theory.finite_width_L)["log_max"])
        strength, fitted_L = paper.fit(lim.rms(cells.influence.values), config, lim.Switches(residual=residual))
        assert float(row["paper_fitted_a"]) == pytest.approx(strength)
        for kind, operator_L in dict(implied=cells.operator.values, fitted=fitted_L).items():
            assert float(row[f"paper_{kind}_log_max"]) == pytest.approx(lim.compare(lim.rms(cells.influence.values), operator_L)["shape_log_max"])
        (told,) = [row for row in rows_of(out, "Measured") if row["residual"] == f"{residual:g}".replace("1", "on")]
        assert told == dict(
            rope="off", residual=told["residual"], layers="2", width="32", length="12", seeds="3", shape=summary.shape,
            **{"first/middle": cli.number(summary.primacy, summary.primacy_se), "last/middle": cli.number(summary.recency, summary.recency_se),
               "last/next": cli.number(summary.anchor, summary.anchor_se), "lowest at": str(summary.valley + 1),
               "middle/lowest": cli.number(summary.middle_over_valley), "last": cli.number(summary.last)},
        )  # fmt: skip
        fitted = lambda p: paper.fit(p, config, lim.Switches(residual=residual))[1]  # noqa: E731
        predictions = {"kernel theory": (lambda p: theory.finite_width_L, ""), "kernel theory, scale fitted": (lambda p: theory.finite_width_L, "shape_"),
                       "paper, a implied": (lambda p: cells.operator.values, "shape_"), f"paper, a fitted: {strength:.3f}": (fitted, "shape_")}  # fmt: skip
        told = {row["prediction"]: row for row in rows_of(out, "Distance") if row["residual"] == told["residual"]}
        assert told.keys() == predictions.keys()
        for name, (predict, shape) in predictions.items():  # what is fitted is fitted again without each seed
            value, error = profile.jackknife(lambda p: lim.compare(p, predict(p)), cells.influence.values)
            for column, key in (("Spearman", "spearman"), ("median", f"{shape}log_median"), ("max", f"{shape}log_max")):
                assert told[name][column] == cli.number(value[key], error[key]), (name, column)


def test_every_flag_of_a_measurement_reaches_it(tmp_path):
    """Into a folder that holds a training, too, which is no business of the grid's."""
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 2)
    zarr.create_group(tmp_path / "here" / "training.zarr", attributes=dict(schema=1))
    flags = "--layers=2 --width=32 --length=8 --seeds=2 --seed=5 --source=1 --probes=4 --tokens=text --out=here"
    runs = run("ablate", [flags.split(), ["--plot-only=here"], "--width=320 --layers=1 --length=4 --seeds=1 --exact --out=exact".split()], tmp_path)
    assert [code for code, *_ in runs] == [0, 0, 0], runs
    assert rows_of(runs[1][1], "Measured") == rows_of(runs[0][1], "Measured")
    config = lim.Config.preset("small").replace(layers=2, width=32)
    ds = lim.open(tmp_path / "here" / "grid.zarr")
    ids = np.frombuffer((tmp_path / "text").read_bytes(), np.uint8).astype(np.int32)
    assert list(ds.seed.values) == [5, 6]
    for seed in (5, 6):
        expected = lim.influence(lim.Decoder.at_birth(config, seed), sweep.window(ids, 8, seed), source=1, probes=4, seed=seed)
        cell = ds.sel(seed=seed).squeeze()
        np.testing.assert_allclose(cell.influence, expected.influence_L, rtol=4e-6)
        np.testing.assert_allclose(cell.stderr, expected.stderr_L, rtol=1e-3)
    exact = lim.open(tmp_path / "exact").squeeze()
    config = config.replace(layers=1, width=320)
    expected = lim.influence(lim.Decoder.at_birth(config, 0), lim.random_tokens(config.vocab, 4, 0))
    assert np.all(exact.stderr == 0) and expected.exact  # which 16 probes, the default at this width, would not be
    np.testing.assert_allclose(exact.influence, expected.influence_L, rtol=4e-6)


def test_half_a_store_is_drawn_with_what_it_lacks(tmp_path):
    """And one by an older version, that kept what float32 does not hold."""
    grid = sweep.Grid(lim.Config.preset("small"), {"norm": {"on": 1.0, "off": 0.0}}, (0, 1, 2), length=8)
    into, numbers = grid.store(tmp_path / "here"), dict(stderr=np.zeros(8), metrics=np.zeros(len(sweep.METRICS)))
    for place in (0, 1):
        both = dict(operator=np.full(8, 1 / 8), theory_error="none here")
        into.write((place, 0), "done", influence=np.arange(8) * (1.0 - place), **numbers, **both)
    into.write((0, 2), "done", influence=np.arange(8) + 1.0, **numbers)
    ((code, out, err),) = run("ablate", [["--plot-only=here"]], tmp_path)
    assert code == 0, err
    (row,) = rows_of(out, "Measured")
    assert (row["norm"], row["seeds"]) == ("on", "2") and "3 of 6 cells are not done yet" in out
    assert "failed: norm=off seed=0: influence is zero everywhere: below float32's reach" in err


def made(profiles_SL, stderr=0.0, theory=True, cv=0.1, bias=0.0, labels=None):
    profiles_SL = np.array(profiles_SL)
    config = lim.Config.preset("small").replace(layers=2, width=32)
    theory_L = profile.rms(profiles_SL) if theory else None
    return ablate.Cell(labels or {}, config, lim.Switches(), 0, profiles_SL, np.full(profiles_SL.shape, stderr), theory_L, bias, cv, "",
                       np.full(profiles_SL.shape[1], 1.0))  # fmt: skip


def test_the_error_of_one_seed_is_that_of_its_probes_or_none():
    one, two = made([[3.0, 1.0, 2.0]], stderr=0.1), made([[3.0, 1.0, 2.0], [4.0, 1.0, 3.0]], stderr=0.1)
    (stderr_L,), words = ablate.standard_errors([one])
    assert stderr_L.tolist() == [0.1] * 3 and words == "standard error of the probes"
    assert np.isnan(ablate.standard_errors([made([[3.0, 1.0, 2.0]])])[0]).all()
    errors, words = ablate.standard_errors([one, two])
    assert np.isnan(errors[0]).all() and words == "standard error"
    np.testing.assert_array_equal(errors[1], profile.jackknife(lambda p: p, two.profiles_SL)[1])
    args = types.SimpleNamespace(rows=None, cols=None)
    for cells in ([made([[3.0, 1.0, 2.0]])], 2 * [made([[3.0, 1.0, 2.0]])]):
        assert not any("error" in text.get_text() for text in ablate.profiles_figure(cells, args).legends[0].get_texts())
    legend = [text.get_text() for text in ablate.profiles_figure([one], args).legends[0].get_texts()]
    assert legend[0] == "measured ± 1 standard error of the probes"


def test_a_prediction_is_named_by_what_it_is():
    cells = [made([[3.0, 1.0, 2.0]], labels=dict(rope="on")), made([[3.0, 1.0, 2.0]], theory=False, labels=dict(rope="off"))]
    figure = ablate.profiles_figure(cells, types.SimpleNamespace(rows=None, cols=None))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["measured", "kernel theory", "paper's operator, a implied (scale fitted)"]


def test_a_finite_width_that_is_not_small_is_pointed_out(capsys):
    ablate.report([made([[3.0, 1.0, 2.0]], bias=0.29, cv=0.3)])
    assert "finite width" not in capsys.readouterr().out
    ablate.report([made([[3.0, 1.0, 2.0]], bias=-0.31, cv=0.1), made([[3.0, 1.0, 2.0]], cv=1.23)])
    ablate.report([made([[3.0, 1.0, 2.0]], cv=1.23), made([[3.0, 1.0, 2.0]]), made([[3.0, 1.0, 2.0]], cv=9.0, theory=False)])
    both, one = [line for line in capsys.readouterr().out.splitlines() if "finite width: " in line]
    assert both == "finite width: bias -0.31 and scatter 1.2 to first order are not small here; read the row with its scale fitted"
    assert one == "finite width: bias 0 and scatter 1.2 to first order are not small here (in 1 of 3 rows, at most); read the row with its scale fitted"


def test_the_compiler_is_checked_at_each_width(monkeypatch):
    seen = {}
    monkeypatch.setattr(lim, "check_compiler", lambda rows, width: seen.update({width: rows}))
    ablate.check_compiler(sweep.Grid(lim.Config.preset("small"), {"width": {"64": 64, "320": 320}, "length": {"8": 8, "32": 32}}, (0,)))
    assert seen.keys() == {64, 320} and all(rows % 32 == 0 for rows in seen.values())


def start(words, cwd, **env):
    return subprocess.Popen([sys.executable, "-m", "experiments.ablate", *words.split()], cwd=cwd, stdout=subprocess.PIPE, text=True,
                            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip


WORKERS = "--layers=1,2 --width=16 --length=8 --rope=on,off --seeds=6"


@pytest.mark.slow
def test_shards_processes_and_devices_give_the_same_numbers(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pod = f"--distributed --coordinator=localhost:{port} --processes=2"
    ways = {"alone": [("", {})], "shards": [("--shard=0/2", {}), ("--shard=1/2", {})], "same": [("--batch=2", {}), ("--batch=2", {})],
            "pod": [(f"{pod} --process=0", {}), (f"{pod} --process=1", {})],
            "devices": [("", dict(XLA_FLAGS="--xla_force_host_platform_device_count=4"))]}  # fmt: skip
    for way, workers in ways.items():
        started = [start(f"{WORKERS} --out={way} {words}", tmp_path, **env) for words, env in workers]
        ends = [(process.communicate(), process.returncode) for process in started]
        assert all(code == 0 for _, code in ends), ends
        assert sum("wrote summary.csv" in out for (out, _), _ in ends) >= 1, ends  # the last one draws
        ds = lim.open(tmp_path / way).load()
        assert (ds.status == "done").all() and len({mark.split()[0] for mark in ds.worker.values.ravel()}) <= len(workers)
        for name in ("influence", "stderr", "theory", "operator"):
            # emulated devices have threads of their own, and sum in another order
            np.testing.assert_allclose(ds[name], lim.open(tmp_path / "alone")[name], rtol=4e-6 if way == "devices" else 0, err_msg=f"{way} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_says_how_to_go_on(stop, tmp_path):
    process = start("--layers=2 --width=32 --length=8 --seeds=2000 --batch=1 --out=here", tmp_path)
    while not any(path.is_file() for path in (tmp_path / "here" / "grid.zarr" / "influence" / "c").rglob("*")):
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(stop)
    _, err = process.communicate()
    line = err.strip().splitlines()[-1]
    assert process.returncode == 130 and "interrupted; " in line and line.endswith("of 2000 cells are done and kept, the same line goes on")
    assert set(np.unique(lim.open(tmp_path / "here").status)) <= {"done", "pending"}


def test_measure_reads_text_and_compares(tmp_path):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 5)
    words = "--length=16 --windows=3 --probes=8 --tokens=~/text --rollout --out=~/here"
    (code, out, err), overflows = run("measure", [words.split(), [*words.split()[:-1], "--residual=1e30", "--out=over"]], tmp_path)
    assert code == 0, err
    assert (
        overflows[:2] == [2, ""]
        and overflows[2].splitlines()[-1] == "experiments.measure: at birth, window 1 of 3: influence is not finite at 16 of 16 positions"
    )
    assert "Traceback" not in overflows[2]
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    text = (tmp_path / "text").read_bytes()
    assert bytes(results["tokens"][0]) == text[:16] and bytes(results["tokens"][2]) == text[-16:]
    assert np.shape(results["runs"]["at birth"]["influence"]) == (3, 16)
    config = lim.Config.preset("small")
    expected = lim.influence(lim.Decoder.at_birth(config, 1), np.array(results["tokens"][1]), probes=8, seed=1)
    np.testing.assert_allclose(results["runs"]["at birth"]["influence"][1], expected.influence_L, rtol=1e-6)
    np.testing.assert_allclose(results["runs"]["at birth"]["stderr"][1], expected.stderr_L, rtol=1e-4)
    assert "kernel theory" in out and "paper's operator" in out and "attention rollout" in out
    expected = rollout.measure(lim.Decoder.at_birth(config, 1), np.array(results["tokens"][1]))
    np.testing.assert_allclose(results["rollout"][1]["rollout_L"], expected.rollout_L, rtol=1e-5)
    mass_N = np.mean([window["first_token_N"] for window in results["rollout"]], axis=0)
    assert [row["first token"] for row in rows_of(out, "Strength of each layer")] == [f"{mass:.3g}" for mass in mass_N]


def test_a_checkpoint_is_compared_with_its_birth(tmp_path):
    """Two windows of a tiny stand-in: what is written and printed is what the library says of each."""
    weights = {name: 0.3 * values for name, values in stand_ins.tensors(stand_ins.QWEN2).items()}
    stand_ins.written(tmp_path / "DIR", stand_ins.QWEN2, weights)
    line = "--weights=DIR --compare=random --tokens=random --length=6 --windows=2 --seed=3 --out=here"
    ((code, out, err),) = run("measure", [line.split()], tmp_path)
    assert code == 0, err
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    decoder = lim.Decoder.from_pretrained(tmp_path / "DIR")
    tokens_WL = [lim.random_tokens(decoder.config.vocab, 6, seed) for seed in (3, 4)]
    trained_WL = [lim.influence(decoder, tokens_L).influence_L for tokens_L in tokens_WL]
    birth_WL = [lim.influence(lim.Decoder.at_birth(decoder.config, seed), tokens_L).influence_L for seed, tokens_L in zip((3, 4), tokens_WL)]
    for name, expected_WL in (("DIR", trained_WL), ("at birth", birth_WL)):
        np.testing.assert_allclose(results["runs"][name]["influence"], expected_WL, rtol=1e-5)
    summaries = {"DIR": profile.summarize_windows(trained_WL), "at birth": profile.summarize_seeds(birth_WL)}
    for row, (name, summary) in zip(rows_of(out, "2 windows of 6 tokens"), summaries.items(), strict=True):
        assert results["runs"][name]["summary"]["primacy"] == pytest.approx(summary.primacy, rel=1e-4)
        assert row == {"network": name, "shape": summary.shape, "first/middle": cli.number(summary.primacy, summary.primacy_se),
                       "last/middle": cli.number(summary.recency, summary.recency_se), "last/next": cli.number(summary.anchor, summary.anchor_se),
                       "lowest at": str(summary.valley + 1), "middle/lowest": cli.number(summary.middle_over_valley),
                       "last": cli.number(summary.last)}  # fmt: skip
    for key, change in measure.changes(np.array(trained_WL), np.array(birth_WL)).items():
        assert results["change"][key]["median"] == pytest.approx(change["median"], rel=1e-4)
    assert (
        "(lowest at, middle/lowest and last: of the median profile)" in out
        and "From birth to the checkpoint, window by window" in out
        and results["change"].keys() == {"primacy", "recency", "anchor"}
    )
    # at birth, what is fitted is fitted again without each network; a checkpoint's distances have no error
    fit = lambda p: paper.fit(p, decoder.config)  # noqa: E731
    value, error = profile.jackknife(lambda p: lim.compare(p, fit(p)[1]), birth_WL)
    (row,) = [row for row in rows_of(out, "Distance") if row["network"] == "at birth" and "operator" in row["prediction"]]
    assert row["prediction"].endswith(f"a={fit(lim.rms(birth_WL))[0]:.3f}") and row["max"] == cli.number(value["shape_log_max"], error["shape_log_max"])


def test_the_error_of_one_window_is_that_of_its_probes_or_none():
    one_WL, two_WL = np.array([[3.0, 1.0, 2.0]]), np.array([[3.0, 1.0, 2.0], [4.0, 1.0, 3.0]])
    for at_birth in (True, False):
        shown_L, stderr_L, words = measure.drawn(one_WL, 0.1 * one_WL, at_birth)
        assert np.array_equal(shown_L, one_WL[0]) and np.array_equal(stderr_L, 0.1 * one_WL[0]) and words == "standard error of the probes"
        assert np.isnan(measure.drawn(one_WL, 0 * one_WL, at_birth)[1]).all()
        shown_L, stderr_L, words = measure.drawn(two_WL, 0.1 * two_WL, at_birth)
        expected_L = profile.jackknife(lambda p: p, two_WL)[1] if at_birth else profile.median_profile(two_WL, logs=True)[1]
        assert np.array_equal(stderr_L, expected_L) and words == "standard error"


def test_switches_of_each_layer_are_named():
    assert measure.words(lim.Switches(rope=0.0, residual=(1.0, 0.25))) == dict(rope="0", residual="1,0.25")


def test_the_change_from_birth_is_paired_by_window():
    """The median of 4/2, 9/3 and 2/4, though the medians' own quotient is 4/3; of last/next, where a 0 stands below, there is none."""
    trained_WL, birth_WL = np.ones((2, 3, 5))
    trained_WL[:, 0], birth_WL[:, 0], trained_WL[:, 4] = [4, 9, 2], [2, 3, 4], 6
    birth_WL[0, 3] = 0
    found = measure.changes(trained_WL, birth_WL)
    assert found.keys() == {"primacy", "recency"}
    assert (found["primacy"]["median"], found["recency"]["median"], found["recency"]["stderr"]) == (2, 6, 0)
    # of three the median's bootstrap is each value with 7/27, 13/27, 7/27 (the middle one leads in 13 of 27 draws)
    logs, weights = np.log([0.5, 2, 3]), np.array([7, 13, 7]) / 27
    error = 2 * np.sqrt(weights @ logs**2 - (weights @ logs) ** 2)
    assert found["primacy"]["stderr"] == pytest.approx(error, rel=1e-6)


def test_the_bench_keeps_what_ran_beside_what_failed():
    """Medians of the repeats that came through, the reasons of the others; nothing at all may come through."""
    args = types.SimpleNamespace(training=None, layers=2, probes=2)
    numbers = lambda seconds: dict(seconds=seconds, first=seconds + 1, memory=1e9, rate=1e11)  # noqa: E731
    runs = {("small", 8): {name: [dict(failed="no torch")] for name in bench.CONTENDERS}}
    text, rate, failures = bench.table(runs, args)
    assert np.isnan(rate) and len(failures) == 4 and failures[0] == "small, 8, lim: no torch"
    runs["small", 8] |= {"lim": [numbers(2.0), numbers(4.0), dict(failed="no memory")], "torch batched": [numbers(6.0)]}
    text, rate, failures = bench.table(runs, args)
    assert rate == 1e11 and failures[0] == "small, 8, lim: no memory"
    row = text.splitlines()[2].split()
    assert row[:5] == ["small", "8", "lim", "1.5", "2.00"] and row[-2:] == ["1.0", "1.0"]


def test_windows_that_overlap_are_pointed_out(capsys):
    cli.note_overlap(64, 16, 4)
    assert capsys.readouterr().err == ""
    cli.note_overlap(63, 16, 4)
    assert "4 windows of 16 tokens overlap in a text of 63" in capsys.readouterr().err


def test_a_contender_of_the_bench_says_what_it_took(tmp_path):
    ((code, out, err),) = run("bench", ["--contender=lim --models=small --layers=2 --lengths=8 --probes=2".split()], tmp_path)
    assert code == 0, err
    numbers = json.loads(out)
    assert 0 < numbers["seconds"] < numbers["first"] and numbers["memory"] > 1e8 and numbers["rate"] > 1e8


@pytest.mark.slow
def test_recall_compares_in_parts_and_trains_the_same_alone(tmp_path):
    tiny = "--pairs=3 --questions=1 --keys=3 --values=2 --layers=1 --steps=4 --evaluations=2 --held-out=10 --batch=4".split()
    compare = [*tiny, "--compare", "--seeds=2", "--out=all"]
    first, second, again, alone = run("recall", [[*compare, "--shard=0/2"], [*compare, "--shard=1/2"], compare, [*tiny, "--seed=1", "--out=one"]], tmp_path)
    assert [code for code, *_ in (first, second, again, alone)] == [0] * 4, (first, second, again, alone)
    assert "5 of 10 runs are done" in first[1]
    assert second[1] == again[1] and "weights-theory" in second[1] and (tmp_path / "all" / "compare.png").stat().st_size > 10_000
    results = json.loads((tmp_path / "all" / "results.json").read_text())
    curves = {(arm, seed): json.loads((tmp_path / "all" / arm / f"seed{seed}" / "result.json").read_text())["curve"]
              for arm in ("none", "curriculum") for seed in (0, 1)}  # fmt: skip
    loss = {key: np.mean(curve["loss_SN"][-1]) for key, curve in curves.items()}
    np.testing.assert_allclose(results["measured"]["none"]["loss"], [loss["none", 0], loss["none", 1]])
    np.testing.assert_allclose(results["differences"]["curriculum"]["loss"], [loss["curriculum", s] - loss["none", s] for s in (0, 1)], atol=1e-12)
    one = json.loads((tmp_path / "one" / "results.json").read_text())
    for name in ("steps_S", "correct_SN", "loss_SN", "training_S"):
        assert one["curve"][name] == curves["none", 1][name]
    assert one["curve"]["steps_S"] == [0, 2, 4] and (tmp_path / "one" / "recall.png").stat().st_size > 10_000
    assert all(f"{correct / 10:.3f}" in alone[1] for correct in one["curve"]["correct_SN"][-1])


@pytest.mark.slow
def test_training_goes_on_and_its_network_can_be_measured(tmp_path):
    """A kill, then the numbers of a run in peace; its folder is a checkpoint for the other commands."""
    seen = kill_training.main(kills=1, steps=20, scratch=tmp_path)
    assert seen.startswith("1 kills of a training of 20 steps; losses, measurements and weights equal to the bit")
    words = "--layers=2 --width=32 --length=32 --batch=4 --windows=3 --measurements=5 --probes=4 --out=peace"
    again, other = run("train", [f"{words} --steps=20 --save_every=1".split(), f"{words} --steps=21".split()], tmp_path)
    assert again[0] == 0 and "bits/byte" in again[1] and "by token frequencies" in again[1], again
    for name in ("valley.png", "gradient.png", "profiles.png", "sinks.png", "metrics.jsonl"):
        assert (tmp_path / "peace" / name).stat().st_size > 1000, name
    assert list((tmp_path / "peace" / "events").glob("events*"))
    assert other[0] == 2 and "holds another training: recipe.steps is 20 there, 21 here" in other[2], other
    ((code, out, err),) = run("measure", ["--weights=peace --length=32 --probes=4 --windows=3 --out=m".split()], tmp_path)
    assert code == 0 and json.loads((tmp_path / "m" / "results.json").read_text())["config"]["width"] == 32, err


@pytest.mark.parametrize("name", ["ablate", "bench", "measure", "ladder", "train", "recall"])
def test_help_teaches_and_ends_well(name):
    done = subprocess.run([sys.executable, "-m", f"experiments.{name}", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"python -m experiments.{name}" in done.stdout and "--out" in done.stdout
