"""Depth and ladder as commands: what they write and print is what the library says of the same networks."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import experiments.ladder
import lim
from lim import ladder, profile
from lim.theory import kernel

ROOT = Path(__file__).parent.parent


def results(name, words, folder):
    """(results.json, what was printed) of a command in a process of its own, whose numbers may have 64 bits."""
    done = subprocess.run([sys.executable, "-m", f"experiments.{name}", *words.split(), f"--out={folder}"], cwd=folder, text=True,
                          capture_output=True, env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder), "JAX_PLATFORMS": "cpu"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text()), done.stdout


def middle_over_mean(profile_L):
    """From the definition in `lim.profile.middle`: the median of the middle tenth, here of 20 positions."""
    return np.median(profile_L[9:11]) / np.mean(profile_L)


def test_depth(tmp_path):
    content, printed = results("depth", "--layers=2 --alpha=0.4 --length=20 --seeds=3", tmp_path)
    laws = dict(zip(content["series"], (dict(residual=0.0), dict(alpha=0.4), dict(residual=1.0))))
    assert ["no residual" in name for name in laws] == [True, False, False] and "0.4" in list(laws)[1] and "standard" in list(laws)[2]
    for name, weights in laws.items():
        for i, layers in enumerate((2,)):
            config, switches = ladder.shape(64, layers, 20), lim.Switches(**weights)
            with jax.enable_x64(True):
                profiles = [lim.influence(lim.Decoder.at_birth(config, seed, dtype=jnp.float64), lim.random_tokens(20, 20, seed), switches).influence_L
                            for seed in range(3)]  # fmt: skip
            value, error, predicted = (column[i] for column in content["series"][name])
            together = [middle_over_mean(profile.rms(profiles[:s] + profiles[s + 1 :])) for s in range(3)]  # one seed left out
            assert value == pytest.approx(middle_over_mean(profile.rms(profiles)), rel=1e-9)  # float32 would be off by 1e-7
            assert error == pytest.approx(np.sqrt(2 / 3 * np.sum((together - np.mean(together)) ** 2)), rel=1e-6)
            assert predicted == pytest.approx(middle_over_mean(kernel.predict(config, 20, switches).influence_L), rel=1e-9)
        np.testing.assert_allclose(content["strengths"][name][2], kernel.effective_strengths(config, 20, switches), rtol=1e-9)
        hops = [row.split()[-1] for row in printed.splitlines() if row.strip().startswith(name)]
        assert float(hops[0]) == pytest.approx(np.sum(content["strengths"][name][2]), abs=6e-4)
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("depth.png", "strengths.png"))


def test_the_ladder_checks_the_compiler_at_each_width(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(lim, "check_compiler", lambda rows, width: checked.append(width))
    monkeypatch.setattr(experiments.ladder, "climb", mock.Mock(side_effect=StopIteration))  # it would measure from here on
    args = types.SimpleNamespace(width=128, layers=1, length=4, seeds=2, probes=None, out=str(tmp_path),
                                 widths=[types.SimpleNamespace(value=width) for width in (64, 192)])  # fmt: skip
    with pytest.raises(StopIteration):
        experiments.ladder.main(args)
    assert checked == [64, 128, 192]


@pytest.mark.slow
def test_ladder(tmp_path):
    content, printed = results("ladder", "--width=64 --layers=2 --length=8 --seeds=3 --widths=64", tmp_path)
    rungs = ladder.rungs(64, 2, 8)
    rows = [re.split(r"  +", row.strip()) for row in printed.splitlines() if re.match(r" *\d ", row)]
    assert [row[0] for row in rows[:6]] == [f"{i} {rung.name}" for i, rung in enumerate(rungs, 1)]
    assert [row[0] for row in rows[6:]] == [f"{i} {rung.name}" for i, rung in enumerate(rungs, 1) if i > 1]
    for rung, kept, row in zip(rungs, content["rungs"], rows):
        profiles_SL, (predicted_L, cv) = np.array(kept["profiles_SL"]), rung.predict(8)
        if rung in (rungs[1], rungs[-1]):  # one compilation
            np.testing.assert_allclose(profiles_SL, [rung.measure(8, seed) for seed in range(3)], rtol=1e-5)
        np.testing.assert_allclose(kept["predicted_L"], predicted_L, rtol=1e-9)
        ratio_L = np.log(np.sqrt(np.mean(profiles_SL**2, axis=0)) / predicted_L)
        square_SL = profiles_SL**2
        scatter = np.mean(np.sqrt(np.sum((square_SL - square_SL.mean(0)) ** 2, axis=0) / (len(square_SL) - 1)) / square_SL.mean(0))
        assert int(row[1]) == len(profiles_SL) == (2 if rung.identity else 3)
        if rung.identity:  # the operator itself: float32's rounding, and no scatter
            assert max(abs(ratio_L)) < 1e-5 and float(row[5]) == 0
            continue
        shown = [float(re.sub(r"[^\d.eE+-].*", "", cell)) for cell in row[2:5]]
        np.testing.assert_allclose(shown, [100 * ratio_L.mean(), np.median(abs(ratio_L)), max(abs(ratio_L))], rtol=0.35, atol=0.06)
        np.testing.assert_allclose([float(cell) for cell in row[5:7]], [scatter, cv], atol=6e-4)
    assert (tmp_path / "widths.png").stat().st_size > 10_000 and set(content["widths"]) == {"64"}
