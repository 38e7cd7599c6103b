"""What lim imports: only what it declares, and what is slow where it is needed, so that `import lim` and --help come at once."""

import ast
import configparser
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

HEAVY = ("matplotlib", "orbax", "pandas", "scipy.optimize", "scipy.special", "scipy.stats", "tensorboardX", "torch", "transformers", "xarray", "zarr")


@pytest.mark.parametrize("module", ["lim", "experiments.ablate"])
def test_an_import_leaves_the_heavy_modules_alone(module):
    code = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert module in loaded
    assert not set(HEAVY) & set(loaded)


def imported(folder):
    """The top-level names that the modules of a folder import, wherever in them."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module.partition(".")[0]


def normal(name):
    return name.lower().replace("_", "-")


def test_what_is_imported_is_declared():
    distributions = importlib.metadata.packages_distributions()
    names = {*imported("lim"), *imported("experiments")} - {*sys.stdlib_module_names, "lim", "experiments", "jaxlib"}  # jax pins jaxlib
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = config["options"]["install_requires"] + config["options.extras_require"]["test"]
    declared = {normal(re.match(r"[\w-]+", line).group()) for line in required.splitlines() if line}
    lacking = {name for name in names if not set(map(normal, distributions.get(name, [name]))) & declared}
    assert not lacking
