"""The command lines: bad input ends in one line and status 2 before any work; good input writes the library's numbers."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import lim
from lim import rollout

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
    ("--alpha=on", "--alpha=on: 'on': allowed are off or a number from 0 to 1"),
    ("--alpha=0.5 --residual=0.5", "residual and alpha both set the weight of the skip"),
    ("--positions=on", "positions=1.0: qwen2 has none, so only off"),
    ("--model=gpt2 --rope=on", "rope=1.0: gpt2 has none, so only off"),
    ("--model=gpt9", "--model=gpt9: model='gpt9': allowed are small, gpt2"),
    ("--model=.", "cannot be read as a config.json"),
    ("--layers=0", "--layers=0: '0': allowed are integers of at least 1"),
    ("--layers=two", "--layers=two: 'two': allowed are integers"),
    ("--width=100", "width=100: must be a multiple of"),
    ("--length=1", "--length=1: '1': allowed are integers of at least 2"),
    ("--seeds=0", "--seeds=0: '0': allowed are integers of at least 1"),
    ("--probes=1", "--probes=1: '1': allowed are integers of at least 2"),
    ("--probes=129", "--probes=129: allowed are 2 to 128, the entries of hidden"),
    ("--probes=4 --exact", "--exact, --probes: give one of them"),
    ("--source=6", "source=6: allowed are 0 to 5"),
    ("--output=gradient", "--output=gradient"),
    ("--out=file/below", "--out=file/below: cannot be written"),
    ("--rows=rope", "--rows=rope: is not an axis of this grid: it has none"),
    ("--rope=off --rope=on", "--rope stands twice"),
    ("--ropes=off", "Unknown command line flag 'ropes'"),
    ("rope=off", "'rope=off' is no flag"),
]
BAD_MEASURE = [
    ("--weights=nowhere", "nowhere"),
    ("--weights=pickled", "pytorch_model.bin"),
    ("--tokens=nowhere.txt", "nowhere.txt: cannot be read"),
    ("--tokens=file", "file: holds no text"),
    ("--length=10000000", "length=10000000: the text has only"),
    ("--windows=0", "--windows=0: '0': allowed are integers of at least 1"),
    ("--compare=trained", "--compare=trained"),
    ("--rope=on,off", "--rope=on,off: 'on,off': allowed are"),
    ("--source=-1", "--source=-1: '-1': allowed are integers of at least 0"),
]
BAD_BENCH = [
    ("--models=gpt9", "model='gpt9': allowed are small"),
    ("--models=small,small", "small stands twice"),
    ("--lengths=1", "--lengths=1: '1': allowed are integers of at least 2"),
    ("--probes=1", "--probes=1: '1': allowed are integers of at least 2"),
    ("--repeats=0", "--repeats=0: '0': allowed are integers of at least 1"),
    ("--device=npu", "--device=npu"),
    ("--contender=tensorflow", "--contender=tensorflow"),
    ("--out=file/below", "--out=file/below: cannot be written"),
]


@pytest.mark.parametrize("name, cases", [("ablate", BAD_ABLATE), ("measure", BAD_MEASURE), ("bench", BAD_BENCH)], ids=lambda v: v if isinstance(v, str) else "")
def test_bad_input_is_one_line_and_status_2(name, cases, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "pickled").mkdir()
    lim_config = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8,
                      vocab_size=300, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4)  # fmt: skip
    (tmp_path / "pickled" / "config.json").write_text(json.dumps(lim_config))
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    outcomes = run(name, [words.split() for words, _ in cases], tmp_path)
    for (words, message), (code, out, err) in zip(cases, outcomes):
        assert (code, out) == (2, ""), (words, code, out, err)
        assert err.count("\n") == 1 and err.startswith(f"experiments.{name}: ") and message in err, (words, err)


TINY = "--layers=2 --width=32 --length=12 --seeds=3"


def test_ablate_writes_the_librarys_numbers(tmp_path):
    ((code, out, _),) = run("ablate", [f"{TINY} --rope=off --residual=on,0.5 --out=here".split()], tmp_path)
    assert code == 0 and (tmp_path / "here" / "influence.png").stat().st_size > 10_000
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    assert [cell["labels"] for cell in results["cells"]] == [dict(rope="off", residual=r, layers="2", width="32", length="12") for r in ("on", "0.5")]
    assert results["flags"]["residual"] == "on,0.5" and results["flags"]["seeds"] == 3
    assert results["provenance"]["command"] == f"python -m experiments.ablate {TINY} --rope=off --residual=on,0.5 --out=here"
    config = lim.Config.preset("small").replace(layers=2, width=32)
    for cell, residual in zip(results["cells"], (1.0, 0.5)):
        for seed, profile_L in enumerate(cell["influence"]):
            expected = lim.influence(lim.Decoder.at_birth(config, seed), lim.random_tokens(config.vocab, 12, seed),
                                     lim.Switches(rope=0.0, residual=residual))  # fmt: skip
            np.testing.assert_allclose(profile_L, expected.influence_L, rtol=1e-6)
        theory = lim.theory.kernel.predict(config, 12, lim.Switches(rope=0.0, residual=residual))
        np.testing.assert_allclose(cell["theory"]["influence_L"], theory.influence_L, rtol=1e-12)
        assert f"{cell['summary']['primacy']:.0f}"[:2] in out


def test_measure_reads_text_and_compares(tmp_path):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 5)
    words = "--length=16 --windows=3 --probes=8 --tokens=text --rollout --out=here"
    ((code, out, err),) = run("measure", [words.split()], tmp_path)
    assert code == 0, err
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


def test_a_contender_of_the_bench_says_what_it_took(tmp_path):
    ((code, out, err),) = run("bench", ["--contender=lim --models=small --layers=2 --lengths=8 --probes=2".split()], tmp_path)
    assert code == 0, err
    numbers = json.loads(out)
    assert 0 < numbers["seconds"] < numbers["first"] and numbers["memory"] > 1e8 and numbers["rate"] > 1e8


@pytest.mark.parametrize("name", ["ablate", "bench", "measure", "ladder"])
def test_help_teaches_and_ends_well(name):
    done = subprocess.run([sys.executable, "-m", f"experiments.{name}", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"python -m experiments.{name}" in done.stdout and "--out" in done.stdout
