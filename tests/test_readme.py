"""README keeps its word: its Python runs as written, its commands parse, its picture is there."""

import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert "influence_L" not in capsys.readouterr().err


def test_the_commands_name_experiments_and_flags_that_exist():
    commands = re.findall(r"python -m experiments\.(\w+)([^`#\n]*)", README)
    assert {name for name, _ in commands} == {"ablate", "measure", "ladder", "depth"}
    helps = {}
    for name, words in commands:
        if name not in helps:
            helps[name] = subprocess.run([sys.executable, "-m", f"experiments.{name}", "--help"], cwd=ROOT,
                                         capture_output=True, text=True).stdout  # fmt: skip
        for word in shlex.split(words):
            flag = word.split("=")[0].removeprefix("--")
            assert flag == "help" or re.search(rf"--(\[no\])?{flag}:", helps[name]), (name, word)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
