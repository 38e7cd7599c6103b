"""README keeps its word: its Python runs as written, its commands parse, its picture is there."""

import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np

import lim
from lim import sweep

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_examples_run(capsys, tmp_path, monkeypatch):
    axes = {"layers": {"2": 2, "6": 6}, "residual": {"on": 1.0, "0.5": 0.5}}
    grid = sweep.Grid(lim.Config.preset("small"), axes, (0, 1, 2), length=8)
    into, rng = grid.store(tmp_path / "runs" / "grid"), np.random.default_rng(0)
    for cell in list(np.ndindex(grid.shape))[:-1]:
        into.write(cell, "done", influence=rng.random(8) + 1, theory=np.full(8, 1.5), metrics=rng.random(len(sweep.METRICS)) + 1)
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(examples) == 2
    printed = []
    for code in examples:
        exec(compile(code, "README.md", "exec"), {})
        printed.append(capsys.readouterr())
    assert re.search(r"done +11\n.*pending +1\n", printed[0].out, re.S) and "nan" not in printed[0].out.lower(), printed[0].out
    assert "Summary(" in printed[1].out and not any(err for _, err in printed)


def test_the_commands_name_experiments_and_flags_that_exist():
    commands = re.findall(r"python -m experiments\.(\w+)([^`#\n\"]*)", README)
    assert {name for name, _ in commands} == {"ablate", "bench", "measure", "ladder", "depth", "train", "recall", "reproduce"}
    helps = {}
    for name, words in commands:
        if name not in helps:
            helps[name] = subprocess.run([sys.executable, "-m", f"experiments.{name}", "--help"], cwd=ROOT,
                                         capture_output=True, text=True).stdout  # fmt: skip
        for word in shlex.split(words):
            flag = word.split("=")[0].removeprefix("--").replace("-", "_")
            assert flag == "help" or re.search(rf"--(\[no\])?{flag}:", helps[name]), (name, word)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
