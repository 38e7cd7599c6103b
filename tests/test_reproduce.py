"""experiments.reproduce: bad input is one line and status 2; the ledger, claims.json and the page hold the library's findings."""

import json
import signal
import sys

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

import lim
from experiments import cli, reproduce
from lim import claims, sweep, verdict


@pytest.fixture(scope="module", autouse=True)
def defined():
    reproduce.define_flags()


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path, tiny):
    monkeypatch.setitem(claims.SCALES, "small", tiny)
    monkeypatch.setattr(lim, "check_compiler", lambda rows, width: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *words.split()])
    code = 0
    with flagsaver.flagsaver():
        try:
            cli.run(reproduce.main)
        except SystemExit as end:
            code = end.code or 0
    flags.FLAGS.unparse_flags()
    return code, *capsys.readouterr()


@pytest.mark.parametrize("words, message", [
    ("--scale=huge", "--scale=huge"),
    ("--only=15", "--only=15: '15': allowed are 1, 2, 3"),
    ("--only=3,x", "--only=3,x: 'x': allowed are 1, 2, 3"),
    ("--only=a,A", "stands twice"),
    ("--seed=-1", "--seed=-1: '-1': allowed are integers of at least 0"),
    ("--out=file/below", "--out=file/below: cannot be written"),
    ("--out=gs://bucket/run", "must be a folder on this machine"),
    ("--out=other", "holds another run (scale tiny, seed 3"),
    ("scale=small", "'scale=small' is no flag"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(words, message, here, tiny, monkeypatch, capsys):
    (here / "file").touch()
    claims.Lab(tiny, 3, here / "other" / "lab")
    code, out, err = run(words, monkeypatch, capsys)
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("experiments.reproduce: ") and message in err, err


def test_what_is_there_is_judged_and_written(here, fill, monkeypatch, capsys):
    lab = fill(here / "runs" / "reproduce" / "small" / "lab")
    monkeypatch.setattr(sweep, "run", lambda *_: pytest.fail("everything is there"))
    code, out, err = run("--scale=small", monkeypatch, capsys)
    assert (code, err) == (0, "") and "not run" not in out
    stored = json.loads((here / "runs/reproduce/small/claims.json").read_text())
    page = (here / "runs/reproduce/small/report/index.html").read_text()
    for claim, row in zip(claims.CLAIMS, stored["claims"], strict=True):
        decision = claims.judge(claim, lab).decision
        assert (row["number"], row["verdict"], row["sentence"]) == (claim.number, decision.verdict, decision.sentence)
        assert f"{claim.number}. {claim.title} [{claim.paper}]: {decision.verdict}" in out
        assert row["chance_of_another_verdict"] == (None if decision.verdict == verdict.NOT_RUN else pytest.approx(decision.chance))
        assert claim.title in page
    assert stored["scale"]["name"] == "tiny" and stored["provenance"]["lim"]
    assert "python -m experiments.reproduce --scale=small --only=12<" in page


def test_only_measures_what_its_claims_need(here, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(claims.Lab, "measure", lambda self, name: asked.append(name) or iter(()))
    code, out, err = run("--only=4,9 --seed=2", monkeypatch, capsys)
    assert code == 0 and asked == ["mask", "parts", "target"] and out.count("not run") == len(claims.CLAIMS)
    assert "not measured yet: mask" in out and (here / "runs/reproduce/small-seed=2/claims.json").exists()


def test_an_interrupted_run_says_how_to_go_on(tiny, monkeypatch, capsys):
    def interrupted(self, name):
        yield ""
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(claims.Lab, "measure", interrupted)
    code, _, err = run("--only=9", monkeypatch, capsys)
    cells = 4 * tiny.seeds + 1
    assert code == 130 and err.splitlines()[-1] == (
        f"experiments.reproduce: interrupted; {cells} measurements are to do, what is done is kept, the same line goes on")  # fmt: skip


def test_failed_networks_are_said_and_leave_their_claims_open(monkeypatch, capsys):
    def failing(grid, store):
        for cell in np.ndindex(grid.shape):
            store.write(cell, "failed", error="influence is not finite")
            yield sweep.Outcome(cell, "failed", "influence is not finite")

    monkeypatch.setattr(sweep, "run", failing)
    code, out, err = run("--only=6", monkeypatch, capsys)
    assert code == 3 and "16 measurements failed; the claims that need them are not run" in err
    assert "6. MLPs keep the topology [no change of shape]: not run" in out and "0 of 4 seeds are done: influence is not finite" in out


@pytest.mark.slow
def test_a_whole_run_measures_and_resumes(monkeypatch, capsys):
    code, out, err = run("--scale=small", monkeypatch, capsys)
    assert code == 0, err
    again, out_again, _ = run("--scale=small", monkeypatch, capsys)
    assert again == 0 and out_again == out
