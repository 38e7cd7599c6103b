"""Whether lim runs on what setup.cfg admits: some tests under each Python, with the oldest and the newest dependencies.

    python tests/compatibility.py
    python tests/compatibility.py --pythons=3.12 --resolutions=oldest --tests=tests/test_train.py,tests/test_tokens.py

Each combination has a virtual environment of its own and the last commit as a clean export, installed by uv (which comes from
PyPI): `oldest` takes the lowest release of every direct dependency. PyTorch is left out. Pythons are looked up as python3.11 and
so on. Exit status: 0, 1 where something failed, 2 for a bad value.
"""

import argparse
import configparser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESOLUTIONS = dict(oldest="lowest-direct", newest="highest")
SHOWN = ("jax", "flax", "numpy", "orbax-checkpoint", "zarr", "xarray", "optax")
TESTS = "tests/test_switches.py,tests/test_config.py,tests/test_influence.py,tests/test_store.py,tests/theory/test_averaging.py"
BINARIES = "Scripts" if os.name == "nt" else "bin"


def run(*command, **how):
    return subprocess.run([str(part) for part in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)


def export(into):
    """The last commit, without what lies beside it."""
    into.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", into], input=archive, check=True)
    return into


def test_requirements():
    """What the tests need, but for PyTorch and ruff."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.extras_require"]["test"].split("\n")
    return [line for line in lines if line and re.match(r"[\w-]+", line).group() not in ("torch", "ruff")]


def combination(uv, python, resolution, tests, scratch):
    """(versions, result, seconds of the tests) in a fresh environment; prints the end of what failed."""
    project, venv = export(scratch / "lim"), scratch / "venv"
    into = venv / BINARIES / "python"
    made = run(uv, "venv", "--python", python, venv)
    if made.returncode == 0:
        made = run(uv, "pip", "install", "--python", into, f"--resolution={RESOLUTIONS[resolution]}", project, *test_requirements())
    if made.returncode:
        print(made.stdout[-3000:], file=sys.stderr)
        return {}, "cannot be installed", 0.0
    listed = json.loads(subprocess.run([uv, "pip", "list", "--python", into, "--format=json"], check=True, capture_output=True).stdout)
    began = time.monotonic()
    tested = run(venv / BINARIES / "pytest", "-n", "0", "-p", "no:cacheprovider", *tests, cwd=project)
    if tested.returncode:
        print(tested.stdout[-6000:], file=sys.stderr)
    result = re.findall(r"^.*(?:passed|failed|error).* in .*$", tested.stdout, re.MULTILINE)
    said = re.sub(r" in .*|=", "", result[-1]).strip() if result else "no tests"
    return {p["name"].lower(): p["version"] for p in listed}, said if tested.returncode == 0 else f"FAILED: {said}", time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default="3.11,3.12,3.13", help="default: %(default)s")
    parser.add_argument("--resolutions", default="oldest,newest", help="default: %(default)s")
    parser.add_argument("--tests", default=TESTS, help="files, or FILE::TEST; default: %(default)s")
    args = parser.parse_args()
    pythons, resolutions, tests = (given.split(",") for given in (args.pythons, args.resolutions, args.tests))
    for python in pythons:
        if not shutil.which(f"python{python}"):
            parser.error(f"--pythons={args.pythons}: there is no python{python} on PATH")
    for resolution in resolutions:
        if resolution not in RESOLUTIONS:
            parser.error(f"--resolutions={args.resolutions}: allowed are {', '.join(RESOLUTIONS)}")
    for test in tests:
        if not (ROOT / test.partition("::")[0]).exists():
            parser.error(f"--tests={args.tests}: there is no {test}")

    print(f"| Python | dependencies | {' | '.join(SHOWN)} | tests | seconds |\n|{' --- |' * (len(SHOWN) + 4)}", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as uv_venv:
        subprocess.run([sys.executable, "-m", "venv", uv_venv], check=True)
        uv = pathlib.Path(uv_venv) / BINARIES / "uv"
        subprocess.run([uv.with_name("python"), "-m", "pip", "install", "-q", "uv"], check=True, stderr=subprocess.DEVNULL)
        for python in pythons:
            for resolution in resolutions:
                with tempfile.TemporaryDirectory() as scratch:
                    versions, result, seconds = combination(uv, shutil.which(f"python{python}"), resolution, tests, pathlib.Path(scratch))
                shown = " | ".join(versions.get(name, "") for name in SHOWN)
                print(f"| {python} | {resolution} | {shown} | {result} | {seconds:.0f} |", flush=True)
                failed |= "passed" not in result or "FAILED" in result
    sys.exit(failed)


if __name__ == "__main__":
    main()
