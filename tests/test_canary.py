"""The canary: silent under a sound compiler, loud under one that returns wrong numbers, and 0.10.2 refused at import."""

import subprocess
import sys

import numpy as np
import pytest

from lim import canary


def test_a_sound_compiler_passes():
    canary.check_compiler(5000, 64)


@pytest.mark.parametrize("rows, width", [canary.KNOWN_BAD, (5000, 64)])
def test_one_wrong_row_stops_the_run(monkeypatch, rows, width):
    """As jaxlib 0.10.2 did: the last row, and no other, is wrong; at the known size or at the run's own."""
    right = canary._sums

    def broken(w_3D, x_RD):
        sums_R = np.array(right(w_3D, x_RD))
        if x_RD.shape == (rows, width):
            sums_R[-1] *= 0.9
        return sums_R

    monkeypatch.setattr(canary, "_sums", broken)
    with pytest.raises(canary.CompilerError, match=f"over {rows} rows is off by .*pip install"):
        canary.check_compiler(5000, 64)


def test_jaxlib_0_10_2_is_refused_at_import():
    code = "import jaxlib; jaxlib.__version__ = '0.10.2'; import lim"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1 and "ImportError: jaxlib 0.10.2 silently returns wrong numbers" in run.stderr
    assert "pip install 'jax>=0.10.1,!=0.10.2'" in run.stderr
