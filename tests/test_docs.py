"""README, the pages of docs/, the notebooks and the docstrings keep their word: what they show runs, and prints what they say."""

import doctest
import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import stand_ins
from absl import flags

import lim
from experiments import cli
from lim import sweep

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.py"))
CONFIG = stand_ins.QWEN2 | dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
                                vocab_size=300, max_position_embeddings=4096)  # fmt: skip


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """The working directory that pages speak of: a checkpoint with a tokenizer in DIR, texts, a grid in runs/grid, more of its seeds in runs/more."""
    weights = {name: 0.1 * values for name, values in stand_ins.tensors(CONFIG).items()}
    stand_ins.write_byte_tokenizer(stand_ins.written(tmp_path / "DIR", CONFIG, weights))
    for name in ("book.txt", "a.txt", "b.txt"):
        (tmp_path / name).write_text((ROOT / "LICENSE").read_text(encoding="utf-8") + name, encoding="utf-8")
    axes = {"layers": {"2": 2, "6": 6}, "residual": {"on": 1.0, "0.5": 0.5}}
    rng, failed, pending = np.random.default_rng(0), (0, 0, 1), (1, 1, 2)
    for name, seeds, absent in (("grid", (0, 1, 2), {failed, pending}), ("more", (3, 4), set())):
        grid = sweep.Grid(lim.Config.preset("small"), axes, seeds, length=8)
        into = grid.store(tmp_path / "runs" / name)
        for cell in set(np.ndindex(grid.shape)) - absent:
            into.write(cell, "done", influence=rng.random(8) + 1, theory=np.full(8, 1.5), metrics=rng.random(len(sweep.METRICS)) + 1)
        if failed in absent:
            into.write(failed, "failed", error="influence is not finite at 3 of 8 positions")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(page):
    """(line, code, what it is to print or "") of each Python block."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.S):
        yield text.count("\n", 0, match.start(1)), match[1], match[2] or ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_a_page_runs_and_prints_what_stands_below_it(page, desk, capsys):
    names = {}
    for line, code, expected in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), names)
        out, err = capsys.readouterr()
        assert not err, (page.name, line, err)
        assert not expected or out == expected, f"{page.name}, line {line}, prints\n{out}and says\n{expected}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_name_experiments_flags_and_values_that_exist(page, desk, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    for name, words in re.findall(r"python -m experiments\.(\w+)([^`#\n\"]*)", page.read_text(encoding="utf-8")):
        parse(name, [word for word in shlex.split(os.path.expandvars(words)) if word != "--help"])


def parse(name, words):
    """Reads a command line as the command does, which refuses by leaving with status 2, and forgets its flags."""
    mine = [flag.name for module, defined in flags.FLAGS.flags_by_module_dict().items() if module.startswith("experiments") for flag in defined]
    flags.FLAGS.remove_flag_values(set(mine) & set(flags.FLAGS))  # that another test module left
    others = set(flags.FLAGS)
    try:
        importlib.import_module(f"experiments.{name}").define_flags()
        cli._parse([name, *words])
    finally:
        flags.FLAGS.unparse_flags()
        flags.FLAGS.remove_flag_values(set(flags.FLAGS) - others)


def test_readme_names_every_experiment():
    named = set(re.findall(r"python -m experiments\.(\w+)", PAGES[0].read_text(encoding="utf-8")))
    assert named == {path.stem for path in ROOT.glob("experiments/*.py")} - {"__init__", "cli"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("name", ["lim", *lim.__all__])
def test_the_example_of_a_docstring(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (found,) = doctest.DocTestFinder(recurse=False).find(lim if name == "lim" else getattr(lim, name), name, globs={"lim": lim})
    assert found.examples
    report = []
    assert doctest.DocTestRunner().run(found, out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_a_script(notebook, tmp_path):
    done = subprocess.run([sys.executable, notebook], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.png")), done.stdout
