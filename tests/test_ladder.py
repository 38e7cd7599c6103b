"""The ladder: on every rung the ensemble meets its prediction, within its sampling error, with nothing fitted."""

import numpy as np
import pytest

from lim import ladder, profile

RUNGS = ladder.rungs(width=128, layers=4, length=24)
SEEDS = 60


@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_the_ensemble_meets_the_prediction(rung):
    """Mean of ‖J‖² over seeds, averaged over positions in logs, against theory with its 1/D bias.

    The bias is the first order in 1/D: what it leaves out is (1/D)² with the layers' and heads' factors, some 2 % of the
    squares at width 128, so 1 % of the norms. The softmax corrections leave out z², z = 0.13: another 1 %.
    """
    predicted_L, cv = rung.predict(24)
    seeds = 1 if rung.identity else SEEDS
    profiles_SL = np.stack([rung.measure(24, seed) for seed in range(seeds)])
    if rung.identity:
        np.testing.assert_allclose(profiles_SL[0], predicted_L, rtol=1e-5)
        return
    level, error = profile.jackknife(lambda p: float(np.mean(np.log(p / predicted_L))), profiles_SL)
    assert error < 0.03, "too few seeds to see three percent"
    assert abs(level) < 3 * error + 0.02
    each_L, each_error_L = profile.jackknife(lambda p: np.log(p / predicted_L), profiles_SL)
    assert np.all(np.abs(each_L - level) < 4 * each_error_L + 0.02)
    scatter_L = profiles_SL**2 / np.mean(profiles_SL**2, axis=0)
    if cv == 0:  # a linear stack: exact at any width in the mean, and its scatter is of order 1/D, beyond the theory
        assert np.mean(scatter_L.std(0, ddof=1)) < 10 / 128
        return
    # a standard deviation from 60 seeds is known to 1/√120 = 9 % where they are normal, to some 15 % as skewed as here
    assert abs(np.mean(scatter_L[:, :-1].std(0, ddof=1)) / cv - 1) < 0.45


def test_each_rung_differs_from_the_one_below():
    """So that a prediction cannot pass for its neighbour's: by more than what a test lets through."""
    predictions = [rung.predict(24)[0] for rung in RUNGS]
    for below, above in zip(predictions[1:-2], predictions[2:-1]):
        assert np.abs(np.log(above / below)).max() > 0.05
    assert np.abs(np.log(predictions[-1] / predictions[-2])).max() > 1e-4  # RoPE moves little, but is there


def test_widths_off_the_grid_are_refused():
    with pytest.raises(ValueError, match="width=100: must be a multiple of 64"):
        ladder.rungs(width=100)
