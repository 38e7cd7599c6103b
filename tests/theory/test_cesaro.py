"""The finite operator against exact rationals, matrices written out, and a Monte Carlo of random linear networks."""

import math
import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from lim.theory import cesaro, density

EPS = np.finfo(float).eps

# (causal, window) of three layers; the last two rows differ by layer, so that the order of the layers shows.
MASKS = {
    "causal": ([1, 1, 1], [None] * 3),
    "full": ([0, 0, 0], [None] * 3),
    "half": ([0.5, 0.5, 0.5], [None] * 3),
    "window": ([1, 1, 1], [4, 4, 4]),
    "window 1": ([1, 1, 1], [1, 1, 1]),
    "window beyond": ([1, 1, 1], [99, 99, 99]),
    "windows": ([1, 1, 1], [2, None, 5]),
    "blends": ([0.25, 1, 0], [None, 3, None]),
}


def dense_mask(length, causal, window):
    """M from its definition, in rationals."""
    matrix = np.empty((length, length), object)
    for i in range(1, length + 1):
        for j in range(1, length + 1):
            if window is not None:
                matrix[i - 1, j - 1] = Fraction(int(i - window < j <= i), min(i, window))
            else:
                weight = Fraction(1) if j <= i else 1 - Fraction(causal)
                matrix[i - 1, j - 1] = weight / (i + (1 - Fraction(causal)) * (length - i))
    return matrix


def dense_row(length, read, skip, branch, causal, window):
    """Row `read` of N_H … N_1 in rationals."""
    row = np.eye(length, dtype=int).astype(object)[read]
    for s, b, c, w in zip(skip[::-1], branch[::-1], causal[::-1], window[::-1]):
        row = Fraction(s) * row + Fraction(b) * row.dot(dense_mask(length, c, w))
    return row


def log(fraction):
    """ln of a positive rational of any size, to rounding."""
    shift = fraction.numerator.bit_length() - fraction.denominator.bit_length()
    return math.log(fraction / Fraction(2) ** shift) + shift * math.log(2)


def assert_close(got, exact, layers):
    """Relative agreement to the rounding of `layers` running sums over the row; zeros exactly."""
    exact = np.array([float(value) for value in exact])
    np.testing.assert_array_equal(got == 0, exact == 0)
    np.testing.assert_allclose(got, exact, rtol=layers * (len(exact) + 6) * EPS, atol=0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("read", [-1, 0, 6, -3])
def test_row_is_the_row_of_the_product_of_matrices(mask, read):
    causal, window = MASKS[mask]
    skip, branch = [0.75, 1.0, 0.25], [0.5, 1.25, 2.0]
    row = cesaro.operator_row(13, skip, branch, causal=causal, window=window, read=read)
    assert_close(row, dense_row(13, read, skip, branch, causal, window), layers=3)


def test_scalars_are_one_value_for_every_layer():
    many = cesaro.operator_row(9, [0.5] * 4, [0.75] * 4, causal=[0.3] * 4, window=[None] * 4)
    np.testing.assert_array_equal(cesaro.operator_row(9, 0.5, 0.75, layers=4, causal=0.3), many)
    many = cesaro.profile(9, [0.5] * 4, window=[3] * 4)
    np.testing.assert_array_equal(cesaro.profile(9, 0.5, layers=4, window=3), many)


def test_no_layers_and_no_strength_leave_the_readout_alone():
    np.testing.assert_array_equal(cesaro.profile(5, [], read=2), [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(cesaro.profile(5, 0, layers=7, causal=0, read=2), [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(cesaro.profile(4, 1, layers=1), [0.25] * 4)


@pytest.mark.parametrize("strengths", [[0.5] * 24, [1] * 24, [0.01] * 24, [1 / n for n in range(1, 25)], [0.9, 0.1, 0, 1]])
def test_profile_is_the_closed_form_in_exact_rationals(strengths):
    assert_close(cesaro.profile(48, strengths), cesaro.exact_row(48, strengths), layers=len(strengths))


def test_closed_form_is_the_matrix_product():
    strengths = [Fraction(1, 3), Fraction(1), Fraction(2, 7), Fraction(0)]
    row = dense_row(11, -1, [1 - a for a in strengths], strengths, [1] * 4, [None] * 4)
    assert cesaro.exact_row(11, strengths) == list(row)
    assert cesaro.exact_row(6, Fraction(1, 3), layers=3) == cesaro.exact_row(6, [Fraction(1, 3)] * 3)


@pytest.mark.parametrize("length, layers, strength, tiny", [(17, 9, 2**-20, 0), (60, 24, 1.0, -1)])
def test_window_keeps_relative_accuracy_where_the_row_is_tiny(length, layers, strength, tiny):
    """A running sum from either end is of order one before it comes to one of these tiny ends: its differences fail."""
    exact = dense_row(length, -1, [1 - strength] * layers, [strength] * layers, [1] * layers, [3] * layers)
    assert 0 < exact[tiny] < 1e-8 * exact.max()
    assert_close(cesaro.profile(length, strength, layers=layers, window=3), exact, layers=layers)


def test_finite_profile_is_the_continuum_binomially_smoothed():
    strengths = np.random.default_rng(0).uniform(size=6)
    n, nodes, weights = 40, *np.polynomial.legendre.leggauss(40)
    t = (np.arange(0, 100, 2)[:, None] + 1 + nodes).ravel()  # P(t > 100) < 1e-30
    x, mass = np.exp(-t), np.tile(weights, 50) * np.exp(density.log_density(t, strengths) - t)
    smoothed = [mass @ (math.comb(n - 1, k) * x**k * (1 - x) ** (n - 1 - k)) for k in range(n)]
    smoothed[-1] += density.anchor(strengths)
    # Gauss's rule of 40 nodes on panels of length 2 is exact to rounding for this polynomial times exponentials.
    np.testing.assert_allclose(cesaro.profile(n, strengths), smoothed, rtol=1e-12)


def test_rows_of_a_long_deep_operator_keep_their_sum():
    profile = cesaro.profile(100_000, [1 / n for n in range(1, 97)], causal=np.linspace(0, 1, 96))
    assert abs(profile.sum() - 1) < 96 * 100_000 * EPS
    row = cesaro.operator_row(1000, 1.0, 0.5, layers=24)
    assert row.sum() == pytest.approx(1.5**24, rel=24 * 1000 * EPS)


@pytest.mark.parametrize("mask", [m for m in MASKS if m not in ("windows", "blends")])
@pytest.mark.parametrize("read", [-1, 4])
def test_second_moment_is_the_recursion_over_pairs_of_positions(mask, read):
    """Truth: the adjoints' second moments, Γ ← s² Γ + g b² Mᵀ Γ M layer by layer; the moment is Γ's diagonal."""
    causal, window = (values[0] for values in MASKS[mask])
    skip, branch, gain = [0.5, 1.0, 0.0, 2.0], [1.0, 0.25, 1.5, 1.0], [0.5, 2.0, 1.0, 0.125]
    matrix = dense_mask(9, causal, window)
    unit = np.eye(9, dtype=int).astype(object)[read]
    gamma = np.outer(unit, unit)
    for s, b, g in zip(skip[::-1], branch[::-1], gain[::-1]):
        gamma = Fraction(s * s) * gamma + Fraction(g * b * b) * matrix.T.dot(gamma).dot(matrix)
    moment = cesaro.second_moment_profile(9, skip, branch, gain, causal=causal, window=window, read=read)
    assert_close(moment, np.diag(gamma), layers=2 * 4 + 4)


def squared_jacobians(rng, length, width, heads, kv_heads, head_dim, skip, branch, std_v, std_o):
    """‖∂h_last/∂x_j‖_F² / D, j = 1..L, of one random linear attention-only network with uniform causal attention."""
    mean = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    pulled = np.zeros((length, width, width))
    pulled[-1] = np.eye(width)
    for s, b in zip(skip[::-1], branch[::-1]):
        w_v = std_v * rng.standard_normal((kv_heads, width, head_dim)).repeat(heads // kv_heads, axis=0)
        w_o = std_o * rng.standard_normal((heads, head_dim, width))
        values = (w_v @ w_o).sum(0)
        pulled = s * pulled + b * (values @ np.tensordot(mean.T, pulled, 1))
    return np.square(pulled).sum((1, 2)) / width


@pytest.mark.parametrize(
    "skip, branch, kv_heads",
    [([1.0] * 4, [1.0] * 4, 4), ([1.0, 0.5, 0.0, 2.0], [1.0, 2.0, 0.7, 0.5], 4), ([0.5] * 6, [0.5] * 6, 1)],
)
def test_second_moment_is_the_mean_over_random_networks(skip, branch, kv_heads):
    length, width, heads, head_dim, std_v, std_o, seeds = 6, 12, 4, 3, 0.35, 0.3, 1000
    gain = (width * std_v**2) * (heads * head_dim * std_o**2)
    rng = np.random.default_rng(1)
    sizes = (length, width, heads, kv_heads, head_dim, skip, branch, std_v, std_o)
    samples = np.array([squared_jacobians(rng, *sizes) for _ in range(seeds)])
    mean, error = samples.mean(0), samples.std(0, ddof=1) / math.sqrt(seeds)
    moment = cesaro.second_moment_profile(length, skip, branch, gain)
    assert np.all(error < 0.06 * mean)
    assert np.all(np.abs(mean - moment) < 3 * error)
    # The sample tells the two accounts apart: all paths added coherently is another number.
    by_path = cesaro.operator_row(length, skip, math.sqrt(gain) * np.array(branch)) ** 2
    assert np.any(np.abs(mean - by_path) > 10 * error)


def test_nothing_comes_through_a_layer_of_no_weight():
    np.testing.assert_array_equal(cesaro.operator_row(4, 0, 0, layers=2), 0)
    np.testing.assert_array_equal(cesaro.second_moment_profile(4, 0, 0, 1, layers=2), 0)
    np.testing.assert_array_equal(cesaro.second_moment_profile(4, 1, 1, 0, layers=2), [0, 0, 0, 1])


def test_second_moment_of_one_hop_is_the_square_of_its_row():
    row = cesaro.operator_row(50, 0.0, 0.5, layers=3)
    np.testing.assert_allclose(cesaro.second_moment_profile(50, 0.0, 0.5, 4.0, layers=3), 4**3 * row**2, rtol=1e-13)


def test_coefficients_are_those_of_the_polynomial_in_exact_integers():
    bits, layers = 20, 300
    strengths = np.random.default_rng(2).integers(1, 2**bits, layers)
    strengths[:5], strengths[5:9] = 0, 2**bits
    exact = [1]
    for a in strengths.tolist():
        exact = [(2**bits - a) * here + a * before for here, before in zip(exact + [0], [0] + exact)]
    truth = [log(Fraction(e, 2 ** (layers * bits))) if e else -math.inf for e in exact]
    got = cesaro.log_coefficients(1 - strengths / 2**bits, strengths / 2**bits)
    np.testing.assert_array_equal(np.isinf(got), np.isinf(truth))
    finite = np.isfinite(truth)
    np.testing.assert_allclose(got[finite], np.array(truth)[finite], rtol=layers * EPS, atol=layers * EPS)


def test_coefficients_beyond_float64():
    constant, linear = [1e-200, 3.0, 0.0] * 4, [2.0, 1e-80, 5e100] * 4
    got = cesaro.log_coefficients(constant, linear)
    exact = [Fraction(1)]
    for c, d in zip(constant, linear):
        exact = [Fraction(c) * here + Fraction(d) * before for here, before in zip(exact + [0], [0] + exact)]
    truth = [log(e) if e else -math.inf for e in exact]
    np.testing.assert_allclose(got, truth, rtol=1e-13)
    with pytest.raises(ValueError, match="odds of a hop are 1e-300 to 0.5"):
        cesaro.log_coefficients([1.0, 1.0], [1e-300, 0.5])


BAD = {
    "length=0:": dict(length=0),
    "length=4.0:": dict(length=4.0),
    "length=True:": dict(length=True),
    "layers=-1:": dict(layers=-1),
    "layers=None:": dict(layers=None),
    "strengths=1.5:": dict(strengths=1.5),
    "strengths=-0.1:": dict(strengths=-0.1),
    "strengths=nan:": dict(strengths=float("nan")),
    "strengths='0.5':": dict(strengths="0.5"),
    "strengths=True:": dict(strengths=True),
    r"strengths=\[\[0.5\]\]:": dict(strengths=[[0.5]]),
    "layers 3, strengths 2": dict(strengths=[0.5, 0.5]),
    "causal=1.1:": dict(causal=1.1),
    "layers 3, causal 2": dict(causal=[1, 1]),
    "window=0:": dict(window=0),
    "window=2.5:": dict(window=2.5),
    r"window=\[2, None\]:": dict(window=[2, None]),
    "window=2: needs causal=1": dict(window=2, causal=0.5),
    "read=8:": dict(read=8),
    "read=-9:": dict(read=-9),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        cesaro.profile(**{**dict(length=8, strengths=0.5, layers=3), **BAD[message]})


def test_bad_input_is_refused_by_the_other_entries():
    with pytest.raises(ValueError, match="skip=-1:"):
        cesaro.operator_row(8, -1, 0.5, layers=2)
    with pytest.raises(ValueError, match="branch=inf:"):
        cesaro.operator_row(8, 1, math.inf, layers=2)
    with pytest.raises(ValueError, match="gain=-2:"):
        cesaro.second_moment_profile(8, 1, 1, -2, layers=2)
    with pytest.raises(ValueError, match="causal=.*one mask"):
        cesaro.second_moment_profile(8, 1, 1, 1, layers=2, causal=[1, 1])
    with pytest.raises(ValueError, match="window=.*one mask"):
        cesaro.second_moment_profile(8, 1, 1, 1, layers=2, window=[2, 3])
    with pytest.raises(ValueError, match="strengths=3"):
        cesaro.exact_row(8, 3, layers=2)
    with pytest.raises(ValueError, match="length=0:"):
        cesaro.exact_row(0, 1, layers=2)


def test_overflow_is_refused_not_returned():
    with pytest.raises(ValueError, match="reaches 10.602, beyond float64"):
        cesaro.operator_row(8, 1, 1, layers=2000)
    with pytest.raises(ValueError, match="reaches 10.3000, beyond float64"):
        cesaro.second_moment_profile(8, 1, 3, 1, layers=3000)
    for skip, branch, gain in ((1e200, 1, 1), (1, 1e200, 0), (0, 1e200, 1)):
        with pytest.raises(ValueError, match="beyond float64"):
            cesaro.second_moment_profile(8, skip, branch, gain, layers=2)
    with pytest.raises(ValueError, match="beyond float64"):
        cesaro.operator_row(8, 1.5e308, 1.5e308, layers=1)
    # Too large on the way, though not at the end: the last layers are pulled through first.
    with pytest.raises(ValueError, match="beyond float64"):
        cesaro.operator_row(8, [1e-200] * 2 + [1e200] * 2, 0, layers=4)
    assert cesaro.operator_row(8, 0.5, 0.5, layers=2000).sum() == pytest.approx(1)


@pytest.mark.slow
def test_a_million_positions_take_about_a_second_and_a_few_arrays():
    start = time.process_time()
    profile = cesaro.profile(10**6, 0.5, layers=96)
    assert time.process_time() - start < 4  # 0.85 s on one core of a 2020s server
    assert abs(profile.sum() - 1) < 1e-11
    tracemalloc.start()
    cesaro.profile(10**6, 0.5, layers=3, window=4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 8 * 10**6
