"""lim.profile against closed forms, hand-computed values, exact fractions and second estimators."""

import dataclasses
import fractions
import itertools
import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
from hypothesis import given, settings

from lim import profile

U_7 = [8.0, 4.0, 3.0, 2.0, 1.0, 0.5, 6.0]


def primacy_density(depth, length):
    """t^(H-1)/(H-1)! at the cell midpoints x = (j+½)/L, t = ln 1/x."""
    t_L = -np.log((np.arange(length) + 0.5) / length)
    return t_L ** (depth - 1) / math.factorial(depth - 1)


# --- middle -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length, window",
    [(1, [0]), (2, [0, 1]), (3, [1]), (10, [4, 5]), (11, [4, 5, 6]), (20, [9, 10]), (21, [9, 10, 11]),
     (64, range(28, 36)), (256, range(115, 141)), (2048, range(921, 1127))],
)  # fmt: skip
def test_middle_is_the_median_of_the_centred_tenth(length, window):
    marked_L = np.zeros(length)
    marked_L[list(window)] = 1.0
    assert profile.middle(marked_L) == 1.0
    # Zero just over half of that window and the median falls to 0: no position outside of it counts.
    marked_L[:] = 1.0
    marked_L[list(window)[: len(window) // 2 + 1]] = 0.0
    assert profile.middle(marked_L) == 0.0
    # The window is centred, and at least a tenth.
    assert window[0] + window[-1] == length - 1 and len(window) >= length / 10


@pytest.mark.parametrize("length", [1, 3, 11, 65, 257, 2047])
def test_middle_of_a_monotone_profile_is_its_middle_value(length):
    falling_L = np.exp(-np.linspace(0, 9, length))
    assert profile.middle(falling_L) == falling_L[(length - 1) // 2]
    assert profile.middle(falling_L[::-1]) == falling_L[(length - 1) // 2]


def test_middle_shrugs_off_a_spike():
    flat_L = np.ones(200)
    flat_L[100] = 1e6
    assert profile.middle(flat_L) == 1.0


# --- summary ----------------------------------------------------------------------------------------------------------


def test_summary_by_hand():
    summary = profile.summarize(U_7)
    assert (summary.length, summary.first, summary.middle, summary.last) == (7, 8.0, 2.0, 6.0)
    assert (summary.primacy, summary.recency, summary.anchor) == (4.0, 3.0, 12.0)
    assert (summary.valley, summary.valley_fraction) == (5, 5.5 / 7)
    assert (summary.valley_depth, summary.middle_over_valley, summary.peak_over_valley) == (12.0, 4.0, 16.0)
    assert (summary.shape, summary.delta) == ("U", False)
    assert math.isnan(summary.primacy_se) and math.isnan(summary.recency_se) and math.isnan(summary.anchor_se)


def test_summary_of_the_density_without_skips():
    """(ln 1/x)^5/5! at L = 101: middle x = 1/2, so first/middle = (ln 202 / ln 2)^5; it falls to the very end."""
    summary = profile.summarize(primacy_density(6, 101))
    assert summary.primacy == pytest.approx((math.log(202) / math.log(2)) ** 5, rel=1e-12)
    assert summary.recency == pytest.approx((math.log(202 / 201) / math.log(2)) ** 5, rel=1e-10)
    assert (summary.valley, summary.shape, summary.valley_depth) == (100, "primacy", 1.0)


@pytest.mark.parametrize("alpha, verdict", [(0.1, "U"), (0.5, "primacy")])
def test_a_skip_weighted_by_one_minus_alpha_makes_a_visible_u_or_not(alpha, verdict):
    """The last row of ((1-α)I + αM)^24, by its recursion v ← (1-α)v + α·revcumsum(v_i/i).

    Its lowest position is the next-to-last at α = 0.1; at 0.5 the anchor (2^-24 = 6.0e-8) barely tops the middle.
    """
    length, row_L = 2048, np.zeros(2048)
    row_L[-1] = 1.0
    for _ in range(24):
        row_L = (1 - alpha) * row_L + alpha * np.cumsum((row_L / np.arange(1, length + 1))[::-1])[::-1]
    summary = profile.summarize(row_L)
    assert summary.shape == verdict
    if alpha == 0.1:
        assert summary.valley == length - 2
        assert summary.last == pytest.approx(0.9**24, rel=0.01)


def test_ties_give_the_first_lowest_position():
    assert profile.summarize([2, 1, 3, 1, 2]).valley == 1


def test_summary_is_a_row_of_plain_numbers():
    row = dataclasses.asdict(profile.summarize(np.asarray(U_7, np.float32)))
    assert {type(value) for value in row.values()} <= {int, float, str, bool}


@pytest.mark.parametrize(
    "values, primacy, recency, anchor, depth, verdict, delta",
    [
        ([5.0], 1.0, 1.0, math.nan, 1.0, "flat", False),
        ([0.0], math.nan, math.nan, math.nan, math.nan, "flat", False),
        ([0.0, 0.0, 0.0], math.nan, math.nan, math.nan, math.nan, "flat", False),
        ([0.0, 0.0, 0.0, 2.0], math.nan, math.inf, math.inf, math.nan, "recency", True),
        ([2.0, 0.0, 0.0, 0.0], math.inf, math.nan, math.nan, math.nan, "primacy", False),
        ([2.0, 0.0, 0.0, 2.0], math.inf, math.inf, math.inf, math.inf, "U", False),
        ([0.0, 1.0, 0.0], 0.0, 0.0, 0.0, math.nan, "hump", False),
        ([1.0, 3.0], 0.5, 1.5, 3.0, 1.0, "recency", False),
    ],
)
def test_zeros_and_few_positions(values, primacy, recency, anchor, depth, verdict, delta):
    summary = profile.summarize(values)
    numbers = (summary.primacy, summary.recency, summary.anchor, summary.valley_depth)
    np.testing.assert_array_equal(numbers, (primacy, recency, anchor, depth))
    assert (summary.shape, summary.delta) == (verdict, delta)


# --- the verdict, each rule both ways ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "primacy, recency, verdict",
    [
        (1.11, 1.11, "U"), (1.09, 1.11, "recency"), (1.11, 1.09, "primacy"), (1.09, 1.09, "flat"),
        (0.5, 1.11, "recency"), (1.11, 0.5, "primacy"), (0.92, 0.92, "flat"), (0.90, 0.92, "hump"),
        (0.92, 0.90, "hump"), (0.5, 0.5, "hump"), (1.1, 1.1, "flat"), (math.nan, math.nan, "flat"),
        (math.inf, math.nan, "primacy"), (math.nan, math.inf, "recency"),
    ],
)  # fmt: skip
def test_shape_by_the_margin(primacy, recency, verdict):
    assert profile.shape(primacy, recency) == verdict


@pytest.mark.parametrize(
    "primacy, primacy_se, recency, recency_se, verdict",
    [  # the limits, ratio·|ln ratio|/2: 0.693 at 2, 1.648 at 3, 0.153 at 0.6
        (2.0, 0.69, 3.0, 1.64, "U"), (2.0, 0.70, 3.0, 1.64, "recency"), (2.0, 0.69, 3.0, 1.65, "primacy"),
        (2.0, 0.70, 3.0, 1.65, "flat"), (0.6, 0.15, 1.0, 0.1, "hump"), (0.6, 0.16, 1.0, 0.1, "flat"),
        (1.0, 0.1, 0.6, 0.15, "hump"), (1.0, 0.1, 0.6, 0.16, "flat"), (1.09, 1e-9, 1.09, 1e-9, "flat"),
        (2.0, math.nan, 3.0, math.nan, "U"), (math.inf, math.nan, 1.0, 0.0, "primacy"),
        (800.0, 500.0, 1.0, 0.1, "primacy"),  # not above 1 by two errors of the ratio, but by far in logarithms
        (0.0, 0.1, 1.0, 0.1, "hump"),
    ],
)  # fmt: skip
def test_shape_needs_two_standard_errors(primacy, primacy_se, recency, recency_se, verdict):
    assert profile.shape(primacy, recency, primacy_se, recency_se) == verdict
    # summarize applies the same rule to the errors that it is given.
    values = [primacy, 1.0, recency] if math.isfinite(primacy) else [1.0, 0.0, 0.0]
    summary = profile.summarize(values, dict(primacy=primacy_se, recency=recency_se, anchor=0.5))
    assert summary.shape == verdict
    np.testing.assert_array_equal([summary.primacy_se, summary.recency_se, summary.anchor_se],
                                  [primacy_se, recency_se, 0.5])  # fmt: skip


@pytest.mark.parametrize(
    "values, verdict, delta",
    [
        ([1.0, 1.0, 1.0, 1.0, 9.0], "recency", True),
        ([1.0, 1.09, 1.0, 1.0, 9.0], "recency", True),
        ([1.0, 1.11, 1.0, 1.0, 9.0], "recency", False),
        ([1.0] * 240 + [0.0, 38.0, 66.0, 146.0, 132.0, 275.0], "recency", False),  # several are heard, though less than a tenth
        ([1.0] * 245 + [275.0], "recency", True),
        ([1.0, 2.0, 3.0, 4.0, 5.0], "recency", False),  # rising
        ([5.0, 4.0, 3.0, 2.0, 1.0], "primacy", False),  # falling
        ([1.0, 1.0, 1.0, 1.0, 1.0], "flat", False),
        ([1.0, 2.0, 3.0, 2.0, 1.0], "hump", False),
    ],
)
def test_shape_and_delta_of_profiles(values, verdict, delta):
    summary = profile.summarize(values)
    assert (summary.shape, summary.delta) == (verdict, delta)


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_rms_by_hand_and_at_the_ends_of_float64():
    np.testing.assert_allclose(profile.rms([[3.0, 0.0], [4.0, 0.0]]), [math.sqrt(12.5), 0.0], rtol=4e-16)
    np.testing.assert_allclose(profile.rms([[3e-200, 3e200], [4e-200, 4e200]]),
                               [math.sqrt(12.5) * 1e-200, math.sqrt(12.5) * 1e200], rtol=4e-16)  # fmt: skip


def test_jackknife_of_a_mean_is_the_textbook_standard_error():
    """The squared rms is the mean of squares, for which the jackknife is s/√S, exactly."""
    profiles_SL = np.random.default_rng(0).gamma(2.0, size=(9, 4))
    value, error = profile.jackknife(lambda p: p**2, profiles_SL)
    np.testing.assert_allclose(value, np.mean(profiles_SL**2, axis=0), rtol=1e-14)
    np.testing.assert_allclose(error, np.std(profiles_SL**2, axis=0, ddof=1) / 3, rtol=1e-12)


def test_jackknife_by_hand():
    """Squares 1, 4, 16 at one position; leaving one out, their means are 10, 17/2, 5/2."""
    left_out = [fractions.Fraction(10), fractions.Fraction(17, 2), fractions.Fraction(5, 2)]
    mean = sum(left_out) / 3
    variance = fractions.Fraction(2, 3) * sum((x - mean) ** 2 for x in left_out)
    value, error = profile.jackknife(lambda p: float(p[0] ** 2), [[1.0], [2.0], [4.0]])
    assert value == pytest.approx(7.0, rel=1e-15)
    assert error == pytest.approx(math.sqrt(variance), rel=1e-14)


def test_jackknife_returns_the_kind_it_was_given():
    profiles_SL = np.random.default_rng(1).gamma(2.0, size=(5, 11))
    value, error = profile.jackknife(profile.ratios, profiles_SL)
    assert value == profile.ratios(profile.rms(profiles_SL))
    assert error.keys() == value.keys() == {"primacy", "recency", "anchor"}
    assert {type(e) for e in error.values()} == {float}
    for name in value:
        assert profile.jackknife(lambda p: profile.ratios(p)[name], profiles_SL) == (value[name], error[name])
    value_L, error_L = profile.jackknife(lambda p: p, profiles_SL)
    assert value_L.shape == error_L.shape == (11,)


def test_jackknife_says_nan_for_one_seed_and_for_what_is_not_finite():
    assert math.isnan(profile.jackknife(lambda p: p[0], [[1.0, 2.0]])[1])
    assert np.isnan(profile.jackknife(lambda p: p, [[1.0, 2.0]])[1]).tolist() == [True, True]
    assert np.isnan(list(profile.jackknife(profile.ratios, [[1.0, 2.0, 3.0]])[1].values())).all()
    value, error = profile.jackknife(profile.ratios, [[1.0, 0.0, 3.0], [2.0, 0.0, 3.0]])
    assert value["primacy"] == math.inf and math.isnan(error["primacy"])


def test_jackknife_covers_the_truth():
    """last/middle of S = 40 seeds, each a log-normal scatter about a known profile: does value ± 2 se hold the truth?

    Student's t with 39 degrees of freedom holds 94.8 %; 400 trials scatter by 1.1 %; the ratio's skew costs about 1 %.
    """
    rng, hits, trials, seeds, sigma = np.random.default_rng(2), 0, 400, 40, 0.3
    truth_L = np.array([8.0, 2.0, 6.0])  # E p² = truth² e^{2σ²}: the factor drops out of the ratio
    for profiles_SL in truth_L * rng.lognormal(0, sigma, (trials, seeds, 3)):
        value, error = profile.jackknife(lambda p: p[2] / p[1], profiles_SL)
        hits += abs(value - 3.0) < 2 * error
    assert 0.948 - 0.01 - 3 * 0.011 < hits / trials < 0.948 + 3 * 0.011


def test_summarize_seeds_is_the_summary_of_the_rms_with_its_errors():
    profiles_SL = np.asarray(U_7) * np.random.default_rng(3).lognormal(0, 0.1, (12, 7))
    summary, error = profile.summarize_seeds(profiles_SL), profile.jackknife(profile.ratios, profiles_SL)[1]
    assert summary == profile.summarize(profile.rms(profiles_SL), error)
    assert (summary.primacy_se, summary.anchor_se) == (error["primacy"], error["anchor"])


def test_seeds_that_scatter_take_the_verdict_back():
    """Two seeds whose first/middle are 3 and 1: √5 ± 1 in all, and √5·ln √5 = 1.8 is less than two errors."""
    profiles_SL = [[3.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert profile.summarize(profile.rms(profiles_SL)).shape == "primacy"
    assert profile.summarize_seeds(profiles_SL).shape == "flat"
    assert profile.summarize_seeds(profiles_SL[:1]).shape == "primacy"  # one seed: no error, the margin alone decides


# --- windows ----------------------------------------------------------------------------------------------------------


def test_median_profile_by_hand():
    """Three windows: the resampled median is the lowest with probability I_{1/3}(2,2) = 7/27, the middle 13/27."""
    median_L, error_L = profile.median_profile([[1.0, 9.0], [4.0, 9.0], [2.0, 9.0]])
    mean = (7 * 1 + 13 * 2 + 7 * 4) / 27
    variance = (7 * (1 - mean) ** 2 + 13 * (2 - mean) ** 2 + 7 * (4 - mean) ** 2) / 27
    np.testing.assert_array_equal(median_L, [2.0, 9.0])
    np.testing.assert_allclose(error_L, [math.sqrt(variance), 0.0], rtol=1e-14, atol=1e-14)


def test_median_profile_is_the_bootstrap_over_all_resamples():
    """W = 5: all 5^5 resamples, each once."""
    values_W = np.array([1.0, 1.5, 2.0, 4.0, 9.0])
    medians = np.median(list(itertools.product(values_W, repeat=5)), axis=1)
    assert profile.median_profile(values_W[:, None])[1] == pytest.approx(medians.std(), rel=1e-12)


@pytest.mark.parametrize("windows, bias", [(31, 0.0), (10, 0.09), (50, 0.03)])
def test_median_profile_against_the_bootstrap(windows, bias):
    """n resamples of kurtosis κ know a standard error to √((κ-1)/4n); even W comes out higher, as documented."""
    profiles_WL, resamples = np.random.default_rng(4).lognormal(0, 0.5, (windows, 2)), 20_000
    bootstrap = scipy.stats.bootstrap((profiles_WL,), np.median, n_resamples=resamples, batch=2000, axis=0,
                                      method="percentile", rng=np.random.default_rng(5))  # fmt: skip
    kurtosis_L = scipy.stats.kurtosis(bootstrap.bootstrap_distribution, axis=-1, fisher=False)
    noise_L = 4 * np.sqrt((kurtosis_L - 1) / (4 * resamples))
    median_L, error_L = profile.median_profile(profiles_WL)
    np.testing.assert_array_equal(median_L, np.median(profiles_WL, axis=0))
    assert np.all(error_L > (1 - noise_L) * bootstrap.standard_error)
    assert np.all(error_L < (1 + bias + noise_L) * bootstrap.standard_error)


def test_median_profile_against_fresh_draws():
    """Its square, averaged over draws, is the variance of the median: 1/(4 W f²) = π/2W for a normal, W = 201."""
    draws_WL = 100 + np.random.default_rng(6).normal(size=(201, 4000))
    median_L, error_L = profile.median_profile(draws_WL)
    asymptotic = math.sqrt(math.pi / 2 / 201)
    assert median_L.std() == pytest.approx(asymptotic, rel=0.04)  # 1/√8000 = 1.1 %, and O(1/W)
    assert math.sqrt(np.mean(error_L**2)) == pytest.approx(asymptotic, rel=0.10)  # bootstrap: high by O(W^-1/2)


def test_median_profile_of_one_window_has_no_error():
    median_L, error_L = profile.median_profile([[1.0, 2.0]])
    assert median_L.tolist() == [1.0, 2.0] and np.isnan(error_L).all()


# --- distances --------------------------------------------------------------------------------------------------------


def test_spearman_by_hand_with_ties():
    """Ranks (1, 2.5, 2.5, 4) against (1, 2, 3, 4), about their mean 2.5: Pearson's 4.5/√(4.5·5)."""
    assert profile.spearman([1, 2, 2, 5], [10, 20, 30, 40]) == pytest.approx(4.5 / math.sqrt(4.5 * 5), rel=1e-14)
    assert profile.spearman([3, 2, 1], [1, 2, 3]) == pytest.approx(-1.0, rel=1e-14)


def test_spearman_does_not_see_size():
    assert profile.spearman(primacy_density(2, 50), primacy_density(9, 50)) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.filterwarnings("error")
def test_spearman_of_a_constant_or_a_single_position_is_nan():
    assert math.isnan(profile.spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(profile.spearman([1, 2, 3], [0, 0, 0]))
    assert math.isnan(profile.spearman([1], [2]))


def test_wasserstein_by_hand():
    assert profile.wasserstein([1, 0, 0, 0, 0], [0, 0, 0, 0, 7]) == pytest.approx(4.0, rel=1e-14)
    assert profile.wasserstein([1, 0, 0, 0, 0], [0, 0, 0, 0, 7], scaled=True) == pytest.approx(1.0, rel=1e-14)
    assert profile.wasserstein([1, 1, 0], [0, 1, 1]) == pytest.approx(1.0, rel=1e-14)  # half moves by 2
    assert profile.wasserstein([3], [8]) == 0.0 == profile.wasserstein([3], [8], scaled=True)


def test_wasserstein_against_cumulative_sums():
    p_L, q_L = np.random.default_rng(7).lognormal(0, 2, (2, 300))
    gap_L = np.cumsum(p_L / p_L.sum()) - np.cumsum(q_L / q_L.sum())
    assert profile.wasserstein(p_L, q_L) == pytest.approx(np.abs(gap_L[:-1]).sum(), rel=1e-12)
    assert profile.wasserstein(p_L, q_L, scaled=True) == pytest.approx(np.abs(gap_L[:-1]).mean(), rel=1e-12)


def test_wasserstein_at_the_ends_of_float64_and_of_nothing():
    assert profile.wasserstein([1e308, 1e308, 0], [0, 1e308, 1e308]) == pytest.approx(1.0, rel=1e-14)
    assert profile.wasserstein([1e-320, 1e-320, 0], [0, 1e-320, 1e-320]) == pytest.approx(1.0, rel=1e-14)
    assert math.isnan(profile.wasserstein([0, 0], [1, 2])) and math.isnan(profile.wasserstein([1, 2], [0, 0]))


def test_log_distance_by_hand():
    measured_L, predicted_L = np.exp([0.3, -0.1, 0.2]), np.ones(3)
    assert profile.log_distance(measured_L, predicted_L) == pytest.approx((0.2, 0.3), rel=1e-14)
    # The median log ratio, 0.2, removed: 0.1, -0.3, 0.
    assert profile.log_distance(measured_L, predicted_L, free_scale=True) == pytest.approx((0.1, 0.3), rel=1e-14)


@pytest.mark.filterwarnings("error")
def test_log_distance_of_zeros():
    assert profile.log_distance([0, 2, 3], [0, 2, 3]) == (0.0, 0.0)
    assert profile.log_distance([0, 2, 3], [1, 2, 3]) == (0.0, math.inf)
    assert profile.log_distance([1, 2, 3], [0, 0, 3]) == (math.inf, math.inf)
    assert profile.log_distance([0, 4, 6], [0, 2, 3], free_scale=True) == pytest.approx((0.0, 0.0), abs=1e-15)
    assert profile.log_distance([0, 4, 6], [1, 2, 3], free_scale=True) == pytest.approx((0.0, math.inf), abs=1e-15)
    assert profile.log_distance([0, 0], [0, 0], free_scale=True) == (0.0, 0.0)
    assert profile.log_distance([1e-300], [1e300])[0] == pytest.approx(600 * math.log(10), rel=1e-14)


def test_compare_holds_them_all():
    p_L, q_L = np.random.default_rng(8).lognormal(0, 1, (2, 40))
    row = profile.compare(p_L, q_L)
    assert row["ratio"] == pytest.approx(np.median(p_L / q_L), rel=1e-15)
    assert row["spearman"] == pytest.approx(scipy.stats.spearmanr(p_L, q_L).statistic, rel=1e-14)
    assert row["wasserstein"] == profile.wasserstein(p_L, q_L)
    assert row["wasserstein_scaled"] == profile.wasserstein(p_L, q_L, scaled=True) != row["wasserstein"]
    assert (row["log_median"], row["log_max"]) == profile.log_distance(p_L, q_L)
    assert (row["shape_log_median"], row["shape_log_max"]) == profile.log_distance(p_L, q_L, free_scale=True)
    assert len(row) == 8
    assert math.isnan(profile.compare([0, 1], [1, 0])["ratio"])


# --- properties -------------------------------------------------------------------------------------------------------

# Whole numbers scaled by a power of two: ranks and ratios survive the scaling to the bit.
whole_L = st.integers(2, 30).flatmap(lambda n: hnp.arrays(np.float64, n, elements=st.integers(0, 50).map(float)))
pairs = st.integers(2, 30).flatmap(lambda n: st.tuples(*[hnp.arrays(np.float64, n, elements=st.integers(0, 50).map(float))] * 2))
power = st.integers(-40, 40).map(lambda k: 2.0**k)


@settings(deadline=None)
@given(whole_L, power)
def test_scaling_changes_no_ratio_and_no_verdict(profile_L, scale):
    before, after = (dataclasses.asdict(profile.summarize(factor * profile_L)) for factor in (1, scale))
    for name in before.keys() - {"first", "middle", "last"}:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    for name in ("first", "middle", "last"):
        assert after[name] == scale * before[name]


@settings(deadline=None)
@given(whole_L)
def test_reversing_swaps_primacy_and_recency(profile_L):
    forth, back = profile.summarize(profile_L), profile.summarize(profile_L[::-1])
    np.testing.assert_array_equal([forth.primacy, forth.recency, forth.valley_depth],
                                  [back.recency, back.primacy, back.valley_depth])  # fmt: skip
    swapped = {"primacy": "recency", "recency": "primacy"}
    assert back.shape == swapped.get(forth.shape, forth.shape)


@settings(deadline=None)
@given(pairs, power)
def test_distances_are_symmetric_and_blind_to_scale(pair, scale):
    p_L, q_L = pair
    for distance in (profile.spearman, profile.wasserstein):
        here = distance(p_L, q_L)
        np.testing.assert_allclose(distance(q_L, p_L), here, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(distance(scale * p_L, q_L), here, rtol=1e-12, atol=1e-12)
    for free_scale in (False, True):
        here = profile.log_distance(p_L, q_L, free_scale)
        # With an even count the median of |r| and of |r - median r| is symmetric too: |-r + median r|.
        np.testing.assert_allclose(profile.log_distance(q_L, p_L, free_scale), here, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(profile.log_distance(scale * p_L, q_L, free_scale=True), here, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(whole_L)
def test_a_profile_is_at_no_distance_from_itself(profile_L):
    row = profile.compare(profile_L, profile_L)
    assert row["log_median"] == row["log_max"] == row["shape_log_median"] == row["shape_log_max"] == 0.0
    if profile_L.any():
        assert row["wasserstein"] == row["wasserstein_scaled"] == 0.0 and row["ratio"] == 1.0
    if np.ptp(profile_L) > 0:
        assert row["spearman"] == pytest.approx(1.0, rel=1e-14)


@settings(deadline=None)
@given(hnp.arrays(np.float64, (6, 3), elements=st.floats(0, 1e3)))
def test_rms_lies_between_mean_and_maximum(profiles_SL):
    rms_L = profile.rms(profiles_SL)
    assert np.all(rms_L <= profiles_SL.max(axis=0) * (1 + 1e-15))
    assert np.all(rms_L >= profiles_SL.mean(axis=0) * (1 - 1e-15))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: profile.summarize([1.0, math.nan]), r"profile\[1\]=nan: influence must be finite and not negative"),
        (lambda: profile.summarize([1.0, math.inf]), r"profile\[1\]=inf"),
        (lambda: profile.summarize([-1.0, 1.0]), r"profile\[0\]=-1.0"),
        (lambda: profile.summarize([]), r"profile has shape \(0,\): must be \[L\] and not empty"),
        (lambda: profile.summarize([[1.0]]), r"profile has shape \(1, 1\): must be \[L\]"),
        (lambda: profile.summarize(["a"]), r"profile: must be an array of numbers \[L\]"),
        (lambda: profile.summarize([1.0], dict(first=1.0)), r"stderr has first: allowed are primacy, recency, anchor"),
        (lambda: profile.summarize([1.0], dict(anchor=-1.0)), r"stderr\['anchor'\]=-1.0: must not be negative"),
        (lambda: profile.rms([1.0, 2.0]), r"profiles has shape \(2,\): must be \[S, L\]"),
        (lambda: profile.jackknife(profile.ratios, [[1.0, math.nan]]), r"profiles\[0, 1\]=nan"),
        (lambda: profile.median_profile([[1.0], [-2.0]]), r"profiles\[1, 0\]=-2.0"),
        (lambda: profile.compare([1.0], [1.0, 2.0]), r"predicted has 2 positions: measured has 1"),
        (lambda: profile.spearman([1.0], [math.nan]), r"predicted\[0\]=nan"),
        (lambda: profile.wasserstein([math.nan], [1.0]), r"measured\[0\]=nan"),
        (lambda: profile.log_distance([1.0], [-1.0]), r"predicted\[0\]=-1.0"),
    ],
)
def test_refusals_name_argument_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_inputs_are_left_alone():
    profiles_SL = np.array([[1.0, 0.0], [2.0, 0.0]])
    before = profiles_SL.copy()
    profile.summarize_seeds(profiles_SL), profile.median_profile(profiles_SL), profile.compare(*profiles_SL)
    np.testing.assert_array_equal(profiles_SL, before)


def test_errors_in_logs_are_those_of_the_logarithm():
    rng = np.random.default_rng(0)
    profiles_WL = np.exp(rng.normal(size=(9, 5)))
    median_L, error_L = profile.median_profile(profiles_WL, logs=True)
    _, log_error_L = profile.median_profile(np.log(profiles_WL) + 10)  # shifted to be positive: an error does not feel it
    np.testing.assert_allclose(error_L, median_L * log_error_L, rtol=1e-12)
    profiles_WL[3, 2] = 0
    assert np.isnan(profile.median_profile(profiles_WL, logs=True)[1]).tolist() == [False, False, True, False, False]


def planted(rng, windows=40, length=120, height=0.0, offset=2):
    """Noisy U-shaped profiles with a factor exp(height) at an offset from each boundary."""
    boundary_WL = rng.random((windows, length)) < 0.02
    x_L = (np.arange(length) + 0.5) / length
    log_WL = 3 * (2 * x_L - 1) ** 2 + 0.3 * rng.standard_normal((windows, length))
    log_WL[:, offset:] += height * boundary_WL[:, :-offset]
    return np.exp(log_WL), boundary_WL


def test_boundary_peaks_are_found_where_they_are(rng=np.random.default_rng(3)):
    profiles_WL, boundary_WL = planted(rng, height=0.6)
    found = profile.boundaries(profiles_WL, boundary_WL)
    assert found.peak == 2 and found.peak_p < 0.01
    counted = boundary_WL[:, 16:-16].sum()
    assert found.count == counted
    at = list(found.offsets_O).index(2)
    # the mean of so many heights with scatter 0.3, less what the running median of 33 noisy values takes
    assert abs(found.aligned_O[at] - 0.6) < 4 * 0.3 / np.sqrt(counted) + 0.1
    np.testing.assert_allclose(found.d_O[at], (found.aligned_O[at] - found.shuffled_O[at]) / 0.3, rtol=0.2)


def few_windows(windows=8, length=120, height=0.0, together=False, noise=0.1):
    """A boundary in each window, at places of their own or at one place, with a factor exp(height) two tokens behind it."""
    rng, boundary_WL = np.random.default_rng(6), np.zeros((windows, length), bool)
    boundary_WL[np.arange(windows), 60 if together else 40 + 5 * np.arange(windows)] = True
    return np.exp(noise * rng.standard_normal((windows, length)) + height * np.roll(boundary_WL, 2, axis=1)), boundary_WL


@pytest.mark.parametrize("windows", [2, 3, 4, 8])
@pytest.mark.parametrize("height", [2.0, -2.0])
def test_a_planted_effect_is_not_weakened_by_few_windows(windows, height):
    """A window that kept its own boundaries among the controls would take 1/W of the effect. A dip is found like a peak."""
    found = profile.boundaries(*few_windows(windows, height=height))
    assert found.peak == 2
    # one boundary a window against W - 1 others, each with noise 0.1 less a running median
    assert abs((found.aligned_O - found.shuffled_O)[10] - height) < 4 * 0.1 * math.sqrt(1 / windows + 1 / windows / (windows - 1)) + 0.05
    # one of 6 or 24 deals is the true one, and one of 8! is hardly ever drawn; of two windows one deal is the other with its sign changed
    np.testing.assert_allclose(found.peak_p, {2: math.nan, 3: 1 / 6, 4: 1 / 24, 8: 1 / 2001}[windows], rtol=0.25)


def test_a_bump_at_the_same_place_of_every_window_is_no_effect_of_boundaries():
    found = profile.boundaries(*few_windows(height=2.0, together=True))
    assert abs(found.aligned_O[10] - 2) < 0.3 and np.all(np.abs(found.d_O) < 1e-12) and found.peak_p == 1


@pytest.mark.parametrize("windows", [3, 4, 5])
def test_the_spread_of_boundaries_is_that_over_all_permutations(windows):
    """And their mean is 0, so it is a standard error; 4000 shuffles know a standard deviation to 1.1 %."""
    profiles_WL, boundary_WL = few_windows(windows)
    found, offset = profile.boundaries(profiles_WL, boundary_WL, shuffles=4000), 3
    above_WL = np.log(profiles_WL) - scipy.ndimage.median_filter(np.log(profiles_WL), size=(1, 33), mode="nearest")
    at_W = boundary_WL.argmax(1) + offset
    exact = []
    for order in itertools.permutations(range(windows)):
        differences = [above_WL[v, at] - np.mean([above_WL[u, at] for u in range(windows) if u != v]) for v, at in zip(order, at_W)]
        exact.append(np.mean(differences))
    assert found.aligned_O[8 + offset] - found.shuffled_O[8 + offset] == pytest.approx(exact[0], abs=1e-14)  # the first order is the true one
    assert np.mean(exact) == pytest.approx(0, abs=1e-14) and found.spread_O[8 + offset] == pytest.approx(np.std(exact), rel=0.05)


def test_boundary_peaks_are_not_found_where_there_are_none():
    rng = np.random.default_rng(4)
    p = [profile.boundaries(*planted(rng), shuffles=200).peak_p for _ in range(40)]
    # under the null p is uniform: 40 of them have mean 0.5 +- 0.046, and the share below 0.1 is 0.1 +- 0.047
    assert abs(np.mean(p) - 0.5) < 0.2 and np.mean(np.array(p) < 0.1) < 0.3


def test_boundaries_that_cannot_be_averaged():
    with pytest.raises(ValueError, match="boundaries: 0 that are not near an end"):
        profile.boundaries(np.ones((3, 50)), np.zeros((3, 50)))


def test_windows_are_summed_up_by_their_median():
    rng = np.random.default_rng(5)
    profiles_WL = np.exp(rng.standard_normal((9, 1))) * np.array([4.0, 1.0, 1.0, 1.0, 2.0])
    s = profile.summarize_windows(profiles_WL)
    np.testing.assert_allclose([s.primacy, s.recency], [4, 2])
    np.testing.assert_allclose([s.primacy_se, s.recency_se], 0, atol=1e-6)  # every window has the same ratios
    profiles_WL[:, 0] *= np.exp(rng.standard_normal(9))
    s = profile.summarize_windows(profiles_WL)
    ratio_W = profiles_WL[:, 0] / profiles_WL[:, 2]
    (median,), (error,) = profile.median_profile(ratio_W[:, None], logs=True)
    np.testing.assert_allclose([s.primacy, s.primacy_se], [median, error])
    assert s.valley_depth == profile.summarize(np.median(profiles_WL, axis=0)).valley_depth


def test_a_ratio_of_windows_lies_among_theirs():
    """The median profile's own need not: low places of single windows come together in its middle."""
    profiles_WL = np.full((2, 21), 10.0)
    profiles_WL[:, 0] = 20
    profiles_WL[0, 9] = profiles_WL[1, 11] = 1
    assert [profile.ratios(p)["primacy"] for p in profiles_WL] == [2, 2] and profile.summarize_windows(profiles_WL).primacy == 2
    assert profile.summarize(profiles_WL.mean(0)).primacy == 20 / 5.5


def test_windows_without_a_middle_have_ratios_all_the_same():
    s = profile.summarize_windows([[1.0, 0, 0, 0, 2], [1.0, 0, 0, 0, 3], [1.0, 0, 0, 0, 4]])
    assert (s.primacy, s.recency, s.shape) == (math.inf, math.inf, "U") and np.isnan(s.primacy_se)
    s = profile.summarize_windows([[0.0, 0, 0, 0, 2], [0.0, 0, 0, 0, 3]])
    assert np.isnan(s.primacy) and s.recency == math.inf and s.shape == "recency"
