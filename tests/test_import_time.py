"""What is slow to import is imported by the functions that need it, so that `import lim` and --help come at once."""

import json
import subprocess
import sys

import pytest

HEAVY = ("matplotlib", "orbax", "pandas", "scipy.optimize", "scipy.special", "scipy.stats", "tensorboardX", "torch", "transformers", "xarray", "zarr")


@pytest.mark.parametrize("module", ["lim", "experiments.ablate"])
def test_an_import_leaves_the_heavy_modules_alone(module):
    code = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert module in loaded
    assert not set(HEAVY) & set(loaded)
