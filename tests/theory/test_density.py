"""The continuum density against closed forms, high-precision decimals, enumeration, and the finite operator."""

import decimal
import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from scipy.special import eval_genlaguerre, ive

from lim.theory import cesaro, density

EPS = np.finfo(float).eps
RANDOM_10K = np.random.default_rng(0).uniform(size=10_000)
HARMONIC_10K = 1 / np.arange(1, 10_001)

# One of each kind, shallow and as deep as promised.
STRENGTHS = {
    "one layer": [0.3],
    "a = 0.1": [0.1] * 24,
    "a = 0.5": [0.5] * 24,
    "a = 1": [1.0] * 24,
    "1/l": 1 / np.arange(1, 25),
    "mixed": [0.0, 1.0, 0.2, 0.9, 1e-12, 1 - 1e-12],
    "deep, a = 0.001": [0.001] * 10_000,
    "deep, a = 0.5": [0.5] * 10_000,
    "deep, a = 1": [1.0] * 10_000,
    "deep, 1/l": HARMONIC_10K,
    "deep, random": RANDOM_10K,
}


def panel_edges(strengths):
    """Edges of panels in t over all but 1e-20 of the mass: 14 standard deviations, and 60 for the exponential tail."""
    a = np.asarray(strengths)
    mean, deviation = a.sum(), math.sqrt((a * (1 - a)).sum() + a.sum())
    low, high = max(0.0, mean - 14 * deviation), mean + 14 * deviation + 60
    return np.linspace(low, high, 2 + int((high - low) / max(3, 3 * deviation)))


def quadrature(edges):
    """Nodes and weights of Gauss's rule, 20 to a panel."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + half * (1 + nodes)).ravel(), (half * weights).ravel()


def decimal_log_density(t, strengths):
    """ln Σ_k P(K=k) t^{k-1}/(k-1)! in decimals of 60 digits, with exponents that never overflow."""
    with decimal.localcontext(decimal.Context(prec=60, Emin=-(10**9), Emax=10**9)):
        t = decimal.Decimal(t)
        term, total = decimal.Decimal(1), decimal.Decimal(0)
        for k, p in enumerate(decimal_hops(strengths)[1:], 1):
            total += p * term
            term *= t / k
        return float(total.ln())


def decimal_hops(strengths):
    """P(K=k) in the decimals of the context: the binomial's recursion in k, or the polynomial's product."""
    a = [decimal.Decimal(float(value)) for value in strengths]
    if len(set(a)) == 1 and 0 < a[0] < 1:
        pmf = [(1 - a[0]) ** len(a)]
        for k in range(1, len(a) + 1):
            pmf.append(pmf[-1] * a[0] / (1 - a[0]) * (len(a) - k + 1) / k)
        return pmf
    pmf = [decimal.Decimal(1)]
    for value in a:
        pmf = [(1 - value) * here + value * before for here, before in zip(pmf + [0], [0] + pmf)]
    return pmf


def tolerance(layers, t):
    """Rounding of the logarithms: a few ulp of the largest that is added up, gammaln(H), (H-1) ln t, or t itself."""
    return 4 * EPS * (10 + max(layers * math.log(layers), layers * abs(math.log(t)) if t > 0 else 0, t))


@pytest.mark.parametrize("name", STRENGTHS)
def test_total_mass_is_one(name):
    strengths = STRENGTHS[name]
    t, weights = quadrature(panel_edges(strengths))
    mass = weights @ np.exp(density.log_density(t, strengths) - t) + density.anchor(strengths)
    assert abs(mass - 1) < 1e-10


@pytest.mark.parametrize("name", STRENGTHS)
@pytest.mark.parametrize("m", [0.5, 7])
def test_moments_are_the_product_over_layers(name, m):
    """E X^m = Π (1 - a_l + a_l/(m+1)): one factor a layer, no hops counted."""
    a = np.asarray(STRENGTHS[name])
    log_moment = np.log1p(-a * m / (m + 1)).sum()
    # ∫ ρ e^{-(m+1)t} dt: in u = (m+1) t the integrand is the moment times a density of the smaller strengths below.
    u, weights = quadrature(panel_edges(a / (1 + m * (1 - a))))
    smooth = weights @ np.exp(density.log_density(u / (m + 1), a) - u - log_moment) / (m + 1)
    assert abs(smooth + np.exp(density.log_anchor(a) - log_moment) - 1) < 1e-10


@pytest.mark.parametrize("layers", [1, 2, 24, 200])
@pytest.mark.parametrize("a", [0.01, 0.5, 0.99])
def test_constant_strength_is_a_laguerre_polynomial(a, layers):
    t = np.array([0.0, 1e-9, 0.1, math.log(2), 1.0, 10.0])
    laguerre = eval_genlaguerre(layers - 1, 1, -a * t / (1 - a))
    closed = math.log(a) + (layers - 1) * math.log1p(-a) + np.log(laguerre)
    np.testing.assert_allclose(density.log_density(t, a, layers=layers), closed, rtol=0, atol=tolerance(layers, 10.0))


@pytest.mark.parametrize("layers", [1, 2, 24, 10_000])
def test_no_residual_is_a_pure_power(layers):
    t = np.array([1e-300, 1e-6, math.log(2), 1.0, 690.8, 1e4, 1e300])
    truth = (layers - 1) * np.log(t) - math.lgamma(layers)
    scale = (layers - 1) * np.abs(np.log(t)) + math.lgamma(layers)
    assert np.all(np.abs(density.log_density(t, 1, layers=layers) - truth) <= 4 * EPS * scale)


@pytest.mark.parametrize("t", [0.0, 1e-300, 1e-3, math.log(2), 16.0, 690.8, 1e4])
@pytest.mark.parametrize("name", ["a = 0.1", "1/l", "mixed", "deep, a = 0.001", "deep, a = 0.5"])
def test_log_density_holds_to_the_last_digits(name, t):
    strengths = STRENGTHS[name]
    truth = decimal_log_density(t, strengths)
    assert abs(density.log_density(t, strengths) - truth) < tolerance(len(strengths), t)


@pytest.mark.parametrize("t", [1e-3, 1.0, 690.8])
def test_log_density_holds_for_hundreds_of_strengths(t):
    strengths = RANDOM_10K[:300]
    assert abs(density.log_density(t, strengths) - decimal_log_density(t, strengths)) < tolerance(300, t)


def test_layers_that_differ_are_a_mixture_over_who_hops():
    strengths = np.array([0.9, 0.2, 1.0, 0.0, 0.6, 0.35])
    t = np.array([0.0, 0.5, 3.0])
    truth, anchor = np.zeros(3), 0.0
    for hops in itertools.product([0, 1], repeat=6):
        chance = np.prod(np.where(hops, strengths, 1 - strengths))
        if sum(hops):
            truth += chance * t ** (sum(hops) - 1) / math.factorial(sum(hops) - 1)
        else:
            anchor += chance
    np.testing.assert_allclose(np.exp(density.log_density(t, strengths)), truth, rtol=1e-14)
    assert density.anchor(strengths) == anchor == 0
    assert density.anchor(strengths[[0, 1]]) == pytest.approx(0.1 * 0.8, rel=1e-15)


@pytest.mark.parametrize("a, t", [(0.1, 1.0), (0.5, math.log(2)), (0.5, 4.0)])
def test_large_depth_is_a_bessel_function(a, t):
    """Perron: ρ → e^{-y/2} (1-a)^H √(λ/t) I_1(2√(λt)), its log y^{3/2}/(12√H) too low; without e^{-y/2} off by y/2."""
    y = a * t / (1 - a)
    for layers, rel in ((400, 0.15), (10_000, 0.03)):
        strength = a * layers / (1 - a)
        z = 2 * math.sqrt(strength * t)
        log_bessel = layers * math.log1p(-a) + 0.5 * math.log(strength / t) + math.log(ive(1, z)) + z
        error = float(density.log_density(t, a, layers=layers)) - log_bessel + y / 2
        assert error == pytest.approx(y**1.5 / 12 / math.sqrt(layers), rel=rel)


@pytest.mark.parametrize("name", STRENGTHS)
def test_cdf_is_the_integral_of_the_density(name):
    strengths = STRENGTHS[name]
    edges = panel_edges(strengths)
    t, weights = quadrature(edges)
    cells = (weights * np.exp(density.log_density(t, strengths) - t)).reshape(-1, 20).sum(1)
    tail = np.append(np.cumsum(cells[::-1])[::-1], 0)
    np.testing.assert_allclose(density.cdf(edges[1:], strengths), tail[1:], atol=1e-10)
    np.testing.assert_array_equal(density.cdf([0.0, -0.0, np.inf], strengths), [1, 1, 0])
    assert density.cdf(5e-324, strengths) == pytest.approx(1 - density.anchor(strengths), abs=1e-11)


def test_cdf_keeps_its_digits_in_the_far_tail():
    t = np.array([1.0, 30.0, 690.8])
    np.testing.assert_allclose(density.cdf(t, 1, layers=1), np.exp(-t), rtol=1e-13)
    np.testing.assert_allclose(density.cdf(t, 1, layers=3), np.exp(-t) * (1 + t + t**2 / 2), rtol=1e-12)
    np.testing.assert_allclose(density.cdf(t, [0.3, 0.6]), np.exp(-t) * (0.54 + 0.18 * (1 + t)), rtol=1e-12)


@pytest.mark.parametrize("a", [1e-9, 0.1, 0.5, 1 - 2**-30])
def test_equal_strengths_hop_binomially(a):
    layers = 10_000
    got = density.log_hops(a, layers=layers)
    for k in (0, 1, 2, 17, 500, 5000, 9000, 9999, 10_000):
        truth = math.log(math.comb(layers, k)) + k * math.log(a) + (layers - k) * math.log1p(-a)
        # Ten thousand roundings of a running sum, of random sign: a hundred ulp of it, and the truth's own 1e5 in ulp.
        assert got[k] == pytest.approx(truth, rel=100 * EPS, abs=1e5 * EPS)
    # One layer of another strength ends the short cut for equal ones.
    mixed = np.logaddexp(np.append(got, -np.inf) + math.log(0.75), np.insert(got, 0, -np.inf) + math.log(0.25))
    np.testing.assert_allclose(density.log_hops([0.25] + [a] * layers), mixed, rtol=100 * EPS, atol=layers * EPS)


@pytest.mark.parametrize("strengths", [RANDOM_10K, HARMONIC_10K[1:], np.geomspace(1e-200, 0.999, 10_000)])
def test_hops_of_ten_thousand_layers_are_right_in_both_tails_and_between(strengths):
    layers, got = len(strengths), density.log_hops(strengths)
    odds = strengths / (1 - strengths)
    none, all_hop = math.fsum(np.log1p(-strengths)), math.fsum(np.log(strengths))
    ends = [none, none + math.log(math.fsum(odds)), all_hop + math.log(math.fsum(1 / odds)), all_hop]
    np.testing.assert_allclose(got[[0, 1, -2, -1]], ends, rtol=100 * EPS, atol=1e-11)
    k = np.arange(layers + 1)
    for z in (1e-3, 0.1, 1.0, 10.0, 1e3):  # Σ P(K=k) z^k = Π (1 - a_l + a_l z), each z weighs another part of the law
        terms = got + k * math.log(z)
        log_sum = terms.max() + math.log(math.fsum(np.exp(terms - terms.max())))
        assert log_sum == pytest.approx(math.fsum(np.log1p(strengths * (z - 1))), rel=100 * EPS, abs=1e-11)
    mean = math.fsum(k * np.exp(got))
    assert density.expected_hops(strengths) == pytest.approx(math.fsum(strengths), rel=1e-14)
    assert mean == pytest.approx(math.fsum(strengths), rel=1e-11)


def test_strengths_one_over_l_hop_like_cycles_of_a_permutation():
    """Π (1 - 1/l + z/l) = z (z+1) … (z+H-1) / H!, so P(K=k) is a Stirling number of the first kind over H!."""
    stirling = [1]
    for m in range(60):
        stirling = [m * here + before for here, before in zip(stirling + [0], [0] + stirling)]
    got = density.log_hops(1 / np.arange(1, 61))
    assert got[0] == -math.inf
    np.testing.assert_allclose(np.exp(got), [float(Fraction(s, math.factorial(60))) for s in stirling], rtol=1e-12)


def test_edges():
    nothing, one, both = dict(strengths=0.0, layers=3), dict(strengths=[0.25]), dict(strengths=[1.0, 0.5])
    t = np.array([0.0, -0.0, 1.0, np.inf])
    np.testing.assert_array_equal(density.log_density(t, **nothing), [-np.inf] * 4)
    np.testing.assert_array_equal(density.cdf(t, **nothing), [1, 1, 0, 0])
    assert density.anchor(**nothing) == 1
    np.testing.assert_allclose(density.log_density(t, **one), math.log(0.25), rtol=1e-15)
    np.testing.assert_allclose(density.log_density(t[:3], **both), np.log([0.5, 0.5, 1.0]), atol=1e-15)
    assert density.log_density(np.inf, **both) == np.inf
    assert density.log_anchor(**both) == -np.inf and density.anchor(**both) == 0
    assert density.log_anchor(1e-12, layers=3) == pytest.approx(-3e-12, rel=1e-11, abs=0)
    assert density.log_anchor(0.5, layers=10_000) == pytest.approx(-10_000 * math.log(2), rel=1e-14)
    for values in (1.0, [[0.0, 1.0]], np.zeros((2, 0, 3))):
        assert density.log_density(values, **both).shape == density.cdf(values, **both).shape == np.shape(values)
    np.testing.assert_array_equal(density.log_hops([]), [0.0])


def test_chunks_change_nothing_and_bound_the_memory():
    t = np.linspace(0, 9000, 601).reshape(1, 601)
    tracemalloc.start()
    deep = density.log_density(t, 0.7, layers=10_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 8 * 2**20  # ten chunks; the whole table of t by k takes 46 MiB, and several of them are needed
    alone = [density.log_density(value, 0.7, layers=10_000) for value in t[0, ::50]]
    np.testing.assert_allclose(deep[0, ::50], alone, rtol=1e-14)


@pytest.mark.parametrize("name", STRENGTHS)
def test_smooth_part_falls_monotonically_in_x(name):
    t = np.geomspace(1e-6, 1e4, 200)
    values = density.log_density(t, STRENGTHS[name])
    assert np.all(np.diff(values) >= -tolerance(len(STRENGTHS[name]), 1e4))
    valley = density.valley(STRENGTHS[name])
    assert valley.log_lowest <= values[0] + 1e-9 and valley.log_lowest <= valley.log_middle + 1e-11


def test_dead_zone_factorial_exponential_or_a_power():
    def middles(strengths):
        return np.array([density.valley(strengths(layers)).log_middle for layers in (100, 1000, 10_000)])

    factorial = middles(lambda layers: np.ones(layers))
    truth = [(n - 1) * math.log(math.log(2)) - math.lgamma(n) for n in (100, 1000, 10_000)]
    np.testing.assert_allclose(factorial, truth, rtol=1e-13)
    # Constant a: ln ρ → H ln(1-a) + 2√(λt), so ln ρ / H tends to ln(1-a).
    constant = middles(lambda layers: np.full(layers, 0.5)) / [100, 1000, 10_000]
    assert constant[-1] == pytest.approx(math.log(0.5) + 2 * math.sqrt(math.log(2) / 10_000), rel=1e-3)
    # a_l = 1/l: a decade of layers costs less than a factor of ten, slowly more as ln H grows.
    exponents = np.diff(middles(lambda layers: 1 / np.arange(1, layers + 1))) / math.log(10)
    np.testing.assert_allclose(exponents, [-0.705, -0.744], atol=0.001)
    assert density.valley(1 / np.arange(1, 1001)).log_lowest == pytest.approx(-math.log(1000), rel=1e-13)
    lowest = density.valley(0.1, layers=24).log_lowest
    assert lowest == pytest.approx(math.log(24 * 0.1 * 0.9**23), rel=1e-13)


def test_published_numbers_of_the_density():
    """The exponents, anchors and slopes quoted for H = 24, and per token at L = 2048."""
    assert density.log_density(1.0, 0.5, layers=24) / math.log(10) == pytest.approx(-3.4, abs=0.05)
    assert density.log_density(1.0, 1.0, layers=24) / math.log(10) == pytest.approx(-22.4, abs=0.05)
    for a, last, middle in ((0.5, 6.0e-8, 5.7e-8), (0.1, 0.080, 2.3e-4)):
        valley = density.valley(a, layers=24)
        assert math.exp(valley.log_anchor) == pytest.approx(last, rel=0.01, abs=0)
        assert math.exp(valley.log_middle) / 2048 == pytest.approx(middle, rel=0.02, abs=0)
        assert valley.anchor_over_middle(2048) == pytest.approx(last / middle, rel=0.02)
    harmonic, step = 1 / np.arange(1, 25), 1e-4
    for t, slope in ((1.0, 1.5), (16.0, 0.35)):
        below, above = density.log_density([t - step, t + step], harmonic)
        assert (above - below) / (2 * step) == pytest.approx(slope, rel=0.02)


def test_published_distances_between_finite_length_and_continuum():
    length, middle = 2048, 1023
    for a in (0.1, 0.3, 0.5):
        finite, continuum = cesaro.profile(length, a, layers=24), density.continuum_profile(length, a, layers=24)
        assert abs(finite[middle] / continuum[middle] - 1) < 0.01
        assert finite.argmin() == length - 2  # the next-to-last token, where H a (1-a)^{H-1} / L is
        assert finite[-2] == pytest.approx(24 * a * (1 - a) ** 23 / length, rel=0.02, abs=0)
    assert finite[middle] == pytest.approx(5.7e-8, rel=0.01, abs=0)
    assert finite[0] / continuum[0] == pytest.approx(5, rel=0.05)
    ratio = cesaro.profile(length, 1.0, layers=24) / density.continuum_profile(length, 1.0, layers=24)
    assert np.abs(ratio[512:1536] - 1).max() == pytest.approx(0.66, abs=0.01)


def test_finite_length_tends_to_the_continuum_as_one_over_length():
    errors = []
    for length in (1000, 2000, 4000):
        third = length // 3
        ratio = cesaro.profile(length, [0.5] * 12) / density.continuum_profile(length, 0.5, layers=12)
        errors.append(ratio[third] - 1)
        assert ratio[-1] == pytest.approx(1, abs=30 / length)  # the anchor
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.02) and errors[1] / errors[2] == pytest.approx(2, rel=0.02)


def test_bad_input_is_refused_by_name():
    for bad in (-1.0, float("nan"), [1.0, -0.5]):
        with pytest.raises(ValueError, match="t=.*at least 0"):
            density.log_density(bad, 0.5, layers=3)
        with pytest.raises(ValueError, match="t=.*at least 0"):
            density.cdf(bad, 0.5, layers=3)
    with pytest.raises(ValueError, match="t='far'"):
        density.cdf("far", 0.5, layers=3)
    for function in (density.log_hops, density.expected_hops, density.log_anchor, density.anchor, density.valley):
        with pytest.raises(ValueError, match="strengths=1.5"):
            function(1.5, layers=3)
        with pytest.raises(ValueError, match="layers=None"):
            function(0.5)
    with pytest.raises(ValueError, match="length=0"):
        density.continuum_profile(0, 0.5, layers=3)
    with pytest.raises(ValueError, match="length=0"):
        density.valley(0.5, layers=3).anchor_over_middle(0)
