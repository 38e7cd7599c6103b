"""The paper's operator under switches against products of matrices written out, and its fit against a fine scan."""

import itertools

import numpy as np
import pytest

from lim.config import Config
from lim.switches import Switches
from lim.theory import cesaro, paper

LENGTH, LAYERS, HEADS = 12, 3, 4
CONFIG = Config("qwen2", layers=LAYERS, width=16, heads=HEADS, kv_heads=2, head_dim=4, inner=32, vocab=50, max_length=LENGTH)
BACK = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
SEEN = np.tri(LENGTH)
SLOPES = 2.0 ** -np.array([2, 4, 6, 8])  # ALiBi's of four heads
AVERAGES = {  # switches of the mask → its weights, one matrix per head or per layer
    "causal": ({}, [SEEN]),
    "blended": (dict(causal=0.4), [np.where(SEEN > 0, 1.0, 0.6)]),
    "window": (dict(window=3), [SEEN * (BACK < 3)]),
    "prefix": (dict(window=3, prefix=2), [np.where(np.arange(LENGTH) < 2, 1.0, SEEN * (BACK < 3))]),
    "alibi": (dict(alibi=0.7), [SEEN * np.exp(-0.7 * slope * np.abs(BACK)) for slope in SLOPES]),
}  # fmt: skip
STRENGTHS = {
    "standard": ({}, [0.5] * 3),
    "half": (dict(residual=0.5), [2 / 3] * 3),
    "by layer": (dict(residual=(0.0, 3.0, 1.0)), [1.0, 0.25, 0.5]),
    "alpha": (dict(alpha=(0.2, 0.9, 0.4)), [0.2, 0.9, 0.4]),
}


@pytest.mark.parametrize("mask, weights", list(itertools.product(AVERAGES, STRENGTHS)))
@pytest.mark.parametrize("source, read", [(0, -1), (1, 5)])
def test_rows_of_products_of_matrices(mask, weights, source, read):
    masked, heads = AVERAGES[mask]
    weighed, strengths = STRENGTHS[weights]
    average = np.mean([w / w.sum(1, keepdims=True) for w in heads], axis=0)
    product = np.eye(LENGTH)
    for a in strengths[source:]:
        product = ((1 - a) * np.eye(LENGTH) + a * average) @ product  # the first block acts first
    found = paper.predict(CONFIG, LENGTH, Switches(**masked, **weighed), source=source, read=read)
    np.testing.assert_allclose(found, product[read], rtol=1e-12, atol=1e-15)


def test_layers_act_in_their_order():
    """Masks that do not commute: which layer sees only its neighbours matters."""
    average = SEEN / SEEN.sum(1, keepdims=True)
    near = SEEN * (BACK < 2)
    near = near / near.sum(1, keepdims=True)
    half = lambda m: (np.eye(LENGTH) + m) / 2  # noqa: E731
    found = paper.predict(CONFIG, LENGTH, Switches(window=(2, 99, 99)))
    np.testing.assert_allclose(found, (half(average) @ half(average) @ half(near))[-1], rtol=1e-12)
    assert np.abs(found - (half(near) @ half(average) @ half(average))[-1]).max() > 1e-3


@pytest.mark.parametrize("a", [0.02, 0.3, 0.97, 1.0])
def test_fit_recovers_strength_and_scale(a):
    config = CONFIG.replace(layers=6)
    profile_L = 7 * cesaro.profile(64, a, layers=6)
    strength, fitted_L = paper.fit(profile_L, config)
    assert strength == pytest.approx(a, abs=1e-5)
    np.testing.assert_allclose(fitted_L, profile_L, rtol=1e-4)  # what 1e-5 of a does to six factors


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end", [0.3, 30.0])
def test_no_strength_of_a_fine_scan_fits_better(seed, end):
    """The two ends ask for different strengths, so that the misfit has two basins; its measure is the rms of the log ratio."""
    rng = np.random.default_rng(seed)
    profile_L = cesaro.profile(48, 0.4, layers=3) * np.exp(0.1 * rng.normal(size=48))
    profile_L[-1] *= end
    profile_L[7] = 0.0  # not heard: left out
    seen_L = profile_L > 0
    _, fitted_L = paper.fit(profile_L, CONFIG)

    def misfit(curve_L):
        ratio = np.log(profile_L / curve_L, where=seen_L, out=np.zeros(48))[seen_L]
        return np.sqrt(np.mean((ratio - ratio.mean()) ** 2))

    scan = [misfit(cesaro.profile(48, a, layers=3)) for a in np.linspace(0.0005, 1, 2000)]
    assert misfit(fitted_L) <= min(scan) + 1e-9
    ratio = np.log(profile_L[seen_L] / fitted_L[seen_L])
    assert abs(ratio.mean()) < 1e-12  # and the scale is the best one


def test_fit_sees_where_it_was_measured():
    row_L = 3 * paper.predict(CONFIG, 24, Switches(alpha=0.35), source=1, read=-6)
    strength, fitted_L = paper.fit(row_L[:19], CONFIG, source=1)
    assert strength == pytest.approx(0.35, abs=1e-5)
    whole, _ = paper.fit(row_L, CONFIG, source=1, read=-6)
    assert whole == pytest.approx(0.35, abs=1e-5)
    assert abs(paper.fit(row_L, CONFIG, read=-6)[0] - 0.35) > 0.05  # three blocks instead of two


def test_nothing_to_fit():
    strength, fitted_L = paper.fit(np.zeros(5), CONFIG)
    assert np.isnan(strength) and np.all(np.isnan(fitted_L))
