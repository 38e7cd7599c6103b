"""What an influence profile says: its primacy, recency, valley and shape, and how far two profiles are apart.

A profile is one non-negative number per token position. Zeros and a single position are allowed; NaN and infinity are
refused; what cannot be computed (0/0, ranks of a constant) is nan, never a made-up number.

Axes: L position, S seed, W text window. Positions are 0-based.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

MARGIN = 0.1  # an end must stand this far above the middle, relative to it, to be seen as above


@dataclasses.dataclass(frozen=True)
class Summary:
    """One row of a table: `dataclasses.asdict` turns it into columns.

    The ratios are x/0 = inf for x > 0 and 0/0 = nan. A standard error is nan where it is not known.

    Attributes:
      length: L.
      first, middle, last: influence of the first position, of the middle and of the last. The middle is the median over
        the central tenth of positions: the value in the middle for a smooth monotone profile, and robust against noise.
      primacy, primacy_se: first/middle and its standard error.
      recency, recency_se: last/middle and its standard error.
      anchor, anchor_se: last/next-to-last and its standard error (1: no anchor; nan for one position). The anchor is
        what the skip connections add to the last position alone.
      valley: the lowest position (the first one, if several tie; in a noisy profile it follows the noise).
      valley_fraction: where that is in the text, (valley + ½)/L.
      valley_depth: lower end over lowest, min(first, last)/min; at least 1. How deep the U is.
      middle_over_valley: middle/min; at least 1. How much lower than the middle the lowest position is.
      peak_over_valley: max/min.
      shape: see `shape`.
      delta: whether recency is all there is: `shape` is "recency" and the positions before the last are level: every
        tenth of them has a median within 10 % of the middle (either way), and each of the three before the last lies there, too.
    """

    length: int
    first: float
    middle: float
    last: float
    primacy: float
    primacy_se: float
    recency: float
    recency_se: float
    anchor: float
    anchor_se: float
    valley: int
    valley_fraction: float
    valley_depth: float
    middle_over_valley: float
    peak_over_valley: float
    shape: str
    delta: bool


def middle(profile_L: ArrayLike) -> float:
    """Median over the central tenth of positions: ⌈L/10⌉ of them, one more where that is needed to be centred."""
    profile_L = check_profile(profile_L)
    length = len(profile_L)
    count = math.ceil(length / 10)
    count += (length - count) % 2
    start = (length - count) // 2
    return float(np.median(profile_L[start : start + count]))


def ratios(profile_L: ArrayLike) -> dict[str, float]:
    """The three contrasts of a profile: primacy (first/middle), recency (last/middle), anchor (last/next-to-last).

    x/0 is inf for x > 0, and 0/0 is nan; the anchor of a single position is nan.
    """
    profile_L = check_profile(profile_L)
    centre, last = middle(profile_L), profile_L[-1]
    next_to_last = profile_L[-2] if len(profile_L) > 1 else math.nan
    return dict(primacy=_ratio(profile_L[0], centre), recency=_ratio(last, centre), anchor=_ratio(last, next_to_last))


def shape(primacy: float, recency: float, primacy_se: float = math.nan, recency_se: float = math.nan) -> str:
    """The verdict on a profile: which of its ends stand above its middle.

    An end is *above* if its ratio to the middle exceeds 1.1 and, where its standard error is known (not nan), the
    ratio's logarithm exceeds 0 by more than 2 of its standard errors (error/ratio); it is *below* if its ratio is under
    1/1.1 and, likewise, its logarithm is under 0 by more than 2 standard errors. Then:

      "U"        both ends above
      "primacy"  the first end alone is above (falling, or flat after a first peak)
      "recency"  the last end alone is above (rising, or flat before a last peak)
      "hump"     no end above, at least one below
      "flat"     neither above nor below: both ends are within 10 % of the middle, or not told from it

    The verdict is about ends and middle only: peaks between them do not change it. An end of nan (0/0) is neither above
    nor below.

    Args:
      primacy, recency: first/middle and last/middle.
      primacy_se, recency_se: their standard errors; nan (not known) leaves the margin of 10 % alone to decide.
    """
    first_above, last_above = _beyond(primacy, primacy_se, 1), _beyond(recency, recency_se, 1)
    if first_above or last_above:
        return "U" if first_above and last_above else "primacy" if first_above else "recency"
    return "hump" if _beyond(primacy, primacy_se, -1) or _beyond(recency, recency_se, -1) else "flat"


def summarize(profile_L: ArrayLike, stderr: Mapping[str, float] | None = None) -> Summary:
    """What one profile says, in numbers.

    Args:
      profile_L: [L].
      stderr: standard errors of `ratios`, as `jackknife(ratios, profiles_SL)` returns them; what is not in it is nan.

    Raises:
      ValueError: the profile is not one-dimensional, is empty, or holds a negative number, NaN or infinity; `stderr`
        holds a name that is not a ratio, or a negative number.

    Example:
      >>> summary = lim.summarize([9.0, 3.0, 2.0, 1.0, 4.0])
      >>> summary.shape, summary.primacy, summary.recency, summary.valley, summary.valley_depth
      ('U', 4.5, 2.0, 3, 4.0)
    """
    profile_L = check_profile(profile_L)
    ratio, errors = ratios(profile_L), _check_stderr(stderr or {})
    centre, first, last, lowest = middle(profile_L), float(profile_L[0]), float(profile_L[-1]), profile_L.min()
    valley = int(profile_L.argmin())
    verdict = shape(ratio["primacy"], ratio["recency"], errors["primacy_se"], errors["recency_se"])
    return Summary(
        length=len(profile_L), first=first, middle=centre, last=last, valley=valley,
        valley_fraction=(valley + 0.5) / len(profile_L), valley_depth=_ratio(min(first, last), lowest),
        middle_over_valley=_ratio(centre, lowest), peak_over_valley=_ratio(profile_L.max(), lowest), shape=verdict,
        delta=verdict == "recency" and _level(profile_L[:-1], centre),
        **ratio, **errors,
    )  # fmt: skip


def summarize_seeds(profiles_SL: ArrayLike) -> Summary:
    """`summarize` of the root mean square over seeds, with jackknife standard errors of the ratios.

    Raises:
      ValueError: as `rms`.
    """
    return summarize(rms(profiles_SL), jackknife(ratios, profiles_SL)[1])


def summarize_windows(profiles_WL: ArrayLike) -> Summary:
    """What the text windows of one network have in common: the median over windows of each ratio, with its standard error.

    Windows' ratios scatter by factors, so each error is that of the median's logarithm, times the median. Everything else
    is of the median profile, whose own ratios may lie outside those of all its windows.

    Raises:
      ValueError: as `rms`.
    """
    profiles_WL = check_profiles(profiles_WL)
    each_W = [ratios(profile_L) for profile_L in profiles_WL]
    values: dict[str, Any] = {}
    for key in each_W[0]:
        ratio_W = np.array([each[key] for each in each_W])
        if np.all(np.isfinite(ratio_W)):
            (values[key],), (values[f"{key}_se"],) = median_profile(ratio_W[:, None], logs=True)
        else:  # over a middle that is not heard
            values |= {key: np.median(ratio_W), f"{key}_se": math.nan}
    values = {key: float(value) for key, value in values.items()}
    verdict = shape(values["primacy"], values["recency"], values["primacy_se"], values["recency_se"])
    of_median = summarize(median_L := median_profile(profiles_WL)[0])
    delta = verdict == "recency" and _level(median_L[:-1], of_median.middle)
    return dataclasses.replace(of_median, shape=verdict, delta=delta, **values)


def rms(profiles_SL: ArrayLike) -> np.ndarray:
    """Root mean square over seeds, [L]: what theory predicts, since it is squares that add over random weights.

    Args:
      profiles_SL: one profile per seed, [S, L], in any unit, which the result has, too.

    Raises:
      ValueError: not two-dimensional, empty, or a negative number, NaN or infinity.

    Example:
      >>> lim.rms([[1.0, 3.0], [7.0, 3.0]]).tolist()
      [5.0, 3.0]
    """
    profiles_SL = check_profiles(profiles_SL)
    scale_L = profiles_SL.max(axis=0)  # squares of values below 1e-162 would vanish
    scale_L[scale_L == 0] = 1.0
    return scale_L * np.sqrt(np.mean((profiles_SL / scale_L) ** 2, axis=0))


def jackknife(statistic: Callable[[np.ndarray], Any], profiles_SL: ArrayLike) -> tuple[Any, Any]:
    """A statistic of the root mean square over seeds, and its standard error over seeds.

    Leaves one seed out at a time: with θ_s the statistic without seed s, se² = (S-1)/S Σ_s (θ_s - θ̄)². Right to
    leading order in 1/S for smooth statistics (ratios, distances, one position's influence); not for jumps such as the
    lowest position.

    Args:
      statistic: takes a profile [L]; returns a number, an array (`lambda p: p` gives the profile itself with its
        error), or a dict of numbers.
      profiles_SL: one profile per seed; the seeds are independent.

    Returns:
      (value, standard error), both of the kind that `statistic` returns. The value is the statistic of all seeds, not
      corrected for bias. The error is nan for one seed, and where the statistic is not finite.

    Raises:
      ValueError: as `rms`.

    Example:
      >>> profiles_SL = [[3.0, 1.0, 2.0], [5.0, 1.0, 2.0], [4.0, 1.0, 2.0]]  # three seeds
      >>> value, error = lim.jackknife(lambda profile_L: profile_L[0] / profile_L[1], profiles_SL)
      >>> print(f"{value:.2f} ± {error:.2f}")
      4.08 ± 0.58
    """
    profiles_SL = check_profiles(profiles_SL)
    seeds = len(profiles_SL)
    value = statistic(rms(profiles_SL))
    without = [statistic(rms(np.delete(profiles_SL, s, axis=0))) for s in range(seeds)] if seeds > 1 else [value]

    def standard_error(values):
        with np.errstate(invalid="ignore"):
            values = np.asarray(values, np.float64)
            error = np.sqrt((seeds - 1) * values.var(axis=0)) if seeds > 1 else np.full(values.shape[1:], math.nan)
        return error if error.ndim else float(error)

    if isinstance(value, dict):
        return value, {name: standard_error([each[name] for each in without]) for name in value}
    return value, standard_error(without)


def median_profile(profiles_WL: ArrayLike, logs: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Median over text windows, [L], and its standard error, [L].

    The error is the bootstrap's in the limit of infinitely many resamples, so it is not random itself. The median of W
    values resampled from x_(1) ≤ … ≤ x_(W) is x_(k) with probability I(k/W) - I((k-1)/W), where I is the cumulative
    Beta((W+1)/2, (W+1)/2), and the error is the standard deviation under these weights (Maritz and Jarrett 1978, JASA
    73:194). Exact for odd W; for even W it interpolates, and comes out higher than the bootstrap (6 % at W = 10, 2 % at
    50). Like any bootstrap of a median it errs on the high side for few windows (in the mean
    square, for log-normal scatter: 23 % at W = 10, 8 % at 50, 4 % at 200).

    Args:
      profiles_WL: one profile per window; the windows are independent (they do not overlap).
      logs: True takes the error of the median's logarithm, times the median: for influence on text, which scatters by
        factors, so that one window in four may hold a value ten times the others'. nan where a window holds 0.

    Returns:
      (median_L, stderr_L); the error is nan for one window.

    Raises:
      ValueError: as `rms`.
    """
    profiles_WL = np.sort(check_profiles(profiles_WL), axis=0)
    windows = len(profiles_WL)
    median_L = np.median(profiles_WL, axis=0)
    if windows == 1:
        return median_L, np.full_like(median_L, math.nan)
    if logs:
        with np.errstate(divide="ignore", invalid="ignore"):
            error_L = _median_error(np.log(profiles_WL))
        return median_L, np.where(profiles_WL[0] > 0, median_L * error_L, math.nan)
    return median_L, _median_error(profiles_WL)


def _median_error(sorted_WL):
    """Maritz and Jarrett's standard error of the median of sorted values."""
    windows = len(sorted_WL)
    half = (windows + 1) / 2
    weight_W = np.diff(scipy.special.betainc(half, half, np.arange(windows + 1) / windows))
    return np.sqrt(weight_W @ (sorted_WL - weight_W @ sorted_WL) ** 2)


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """Influence around the boundaries of documents, against the same places of other windows.

    The unit is ln influence above its running median. `d` is Cohen's: the difference in units of the scatter of all positions.

    Attributes:
      count: boundaries that were averaged.
      offsets_O: positions from the boundary; 0 is the separator, 1 the document's first token.
      aligned_O, shuffled_O: mean over boundaries of their own windows, and of all other windows at the same places.
      spread_O: standard deviation of aligned - shuffled over shuffles: its standard error if boundaries meant nothing.
      d_O: (aligned - shuffled) / scatter.
      peak, peak_p: the offset from 0 on at which |d| is largest, and the share of shuffles whose largest |d| there is no smaller: at
        least 1 over the number of ways to deal the boundaries to windows, and nan where there are two, which differ in sign alone.
    """

    count: int
    offsets_O: np.ndarray
    aligned_O: np.ndarray
    shuffled_O: np.ndarray
    spread_O: np.ndarray
    d_O: np.ndarray
    peak: int
    peak_p: float


def boundaries(profiles_WL: ArrayLike, boundary_WL: ArrayLike, radius: int = 8, shuffles: int = 2000, seed: int = 0) -> Boundaries:
    """How much more influence there is near boundaries than the neighbourhood has, with controls at the same positions.

    Each profile is taken as ln influence less its running median over 4·radius + 1 positions, which takes out the U. A
    boundary's controls are all other windows at its place, never its own. A shuffle deals the windows' boundaries to windows at
    random, and compares each with the others of its new window; one shuffle in W! leaves all where they are, so p is exact.

    Args:
      profiles_WL: influence, positive.
      boundary_WL: where boundaries are.
      radius: offsets that are looked at, on either side; boundaries nearer than 2·radius to an end are left out.
      shuffles, seed: of the windows.

    Raises:
      ValueError: there is no boundary to average, or only one window.
    """
    profiles_WL, boundary_WL = check_profiles(profiles_WL), np.array(boundary_WL, bool)
    windows, length = profiles_WL.shape
    boundary_WL[:, : 2 * radius] = boundary_WL[:, max(length - 2 * radius, 0) :] = False
    if not boundary_WL.any() or windows < 2 or not np.all(profiles_WL > 0):
        raise ValueError(f"boundaries: {boundary_WL.sum()} that are not near an end, in {windows} windows: at least 1 in 2 are "
                         "needed, and influence that is nowhere zero")  # fmt: skip
    above_WL = np.log(profiles_WL)
    above_WL = above_WL - scipy.ndimage.median_filter(above_WL, size=(1, 4 * radius + 1), mode="nearest")
    scatter = above_WL[:, 2 * radius : length - 2 * radius].std()
    others_WL = (above_WL.sum(0) - above_WL) / (windows - 1)
    of_B, at_B = np.nonzero(boundary_WL)
    offsets_O, rng = np.arange(-radius, radius + 1), np.random.default_rng(seed)

    def mean_around(values_WL, window_B):
        return values_WL[window_B[:, None], at_B[:, None] + offsets_O].mean(0)

    aligned_O, shuffled_O = mean_around(above_WL, of_B), mean_around(others_WL, of_B)
    null_SO = np.stack([mean_around(above_WL - others_WL, rng.permutation(windows)[of_B]) for _ in range(shuffles)])
    ahead, d_O = slice(radius, None), (aligned_O - shuffled_O) / scatter
    peak = int(np.argmax(np.abs(d_O[ahead])))
    largest_S = np.abs(null_SO[:, ahead]).max(1) / scatter
    as_large = largest_S >= abs(d_O[radius + peak]) - 1e-9  # the same sum in another order is no smaller
    few = math.perm(windows, len(set(of_B))) < 3
    return Boundaries(len(at_B), offsets_O, aligned_O, shuffled_O, null_SO.std(0), d_O, peak,
                      math.nan if few else float((1 + as_large.sum()) / (1 + shuffles)))  # fmt: skip


def spearman(measured_L: ArrayLike, predicted_L: ArrayLike) -> float:
    """Spearman's rank correlation over positions; nan for a constant profile (it has no ranks) and for L = 1.

    Any two falling profiles score 1, whatever their sizes: read it beside `log_distance`.
    """
    measured_L, predicted_L = _check_pair(measured_L, predicted_L)
    if np.ptp(measured_L) == 0 or np.ptp(predicted_L) == 0:
        return math.nan
    return float(scipy.stats.spearmanr(measured_L, predicted_L).statistic)


def wasserstein(measured_L: ArrayLike, predicted_L: ArrayLike, scaled: bool = False) -> float:
    """Earth mover's distance between two profiles, each divided by its sum: how far influence must be moved.

    Args:
      measured_L, predicted_L: [L] each.
      scaled: False: in tokens, on positions 0..L-1; True: as a fraction of the text, on positions j/(L-1) from 0 to 1
        (so it is the former over L-1).

    Returns:
      The distance; nan if a profile is zero everywhere.
    """
    measured_L, predicted_L = _check_pair(measured_L, predicted_L)
    if not (measured_L.any() and predicted_L.any()):
        return math.nan
    # Divided by the peak first: scipy's sum over weights must neither overflow nor lose subnormal numbers.
    measured_L, predicted_L = measured_L / measured_L.max(), predicted_L / predicted_L.max()
    place_L = np.arange(len(measured_L)) / (max(len(measured_L) - 1, 1) if scaled else 1)
    return float(scipy.stats.wasserstein_distance(place_L, place_L, measured_L, predicted_L))


def log_distance(measured_L: ArrayLike, predicted_L: ArrayLike, free_scale: bool = False) -> tuple[float, float]:
    """Median and maximum over positions of |ln(measured/predicted)|: 0.01 is one percent.

    A position where both are zero agrees (0); one where only one is zero is infinitely far (inf).

    Args:
      measured_L, predicted_L: [L] each.
      free_scale: compare shapes only: the median log ratio (over positions where both are positive) is removed first.

    Returns:
      (median, maximum), each at least 0, possibly inf.
    """
    measured_L, predicted_L = _check_pair(measured_L, predicted_L)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio_L = np.log(measured_L) - np.log(predicted_L)
    both_L = np.isfinite(log_ratio_L)
    if free_scale and both_L.any():
        log_ratio_L[both_L] -= np.median(log_ratio_L[both_L])
    log_ratio_L[(measured_L == 0) & (predicted_L == 0)] = 0.0
    return float(np.median(np.abs(log_ratio_L))), float(np.abs(log_ratio_L).max())


def compare(measured_L: ArrayLike, predicted_L: ArrayLike) -> dict[str, float]:
    """Every distance between two profiles, as columns of a table.

    Args:
      measured_L, predicted_L: [L] each; in the same unit, where `ratio`, `log_median` and `log_max` are to mean something.

    Returns:
      ratio: median over positions of measured/predicted, where both are positive (nan if nowhere).
      spearman, wasserstein, wasserstein_scaled: as the functions of these names (`scaled=True` for the latter).
      log_median, log_max: `log_distance` in absolute units.
      shape_log_median, shape_log_max: `log_distance` with a free scale.

    Raises:
      ValueError: the two differ in length, or as `summarize`.

    Example:
      >>> distance = lim.compare([8.0, 4.0, 2.0], [4.0, 2.0, 1.0])  # twice as large, of the same shape
      >>> {name: round(distance[name], 3) for name in ("ratio", "log_max", "shape_log_max", "spearman")}
      {'ratio': 2.0, 'log_max': 0.693, 'shape_log_max': 0.0, 'spearman': 1.0}
    """
    measured_L, predicted_L = _check_pair(measured_L, predicted_L)
    both_L = (measured_L > 0) & (predicted_L > 0)
    ratio = float(np.median(measured_L[both_L] / predicted_L[both_L])) if both_L.any() else math.nan
    log_median, log_max = log_distance(measured_L, predicted_L)
    shape_log_median, shape_log_max = log_distance(measured_L, predicted_L, free_scale=True)
    return dict(
        ratio=ratio, spearman=spearman(measured_L, predicted_L), wasserstein=wasserstein(measured_L, predicted_L),
        wasserstein_scaled=wasserstein(measured_L, predicted_L, scaled=True), log_median=log_median, log_max=log_max,
        shape_log_median=shape_log_median, shape_log_max=shape_log_max,
    )  # fmt: skip


def check_profile(profile_L: ArrayLike, name: str = "profile") -> np.ndarray:
    """The profile as a float64 array [L].

    Raises:
      ValueError: names the argument, and what is wrong with it.
    """
    return _check(profile_L, name, ("L",))


def check_profiles(profiles_SL: ArrayLike, name: str = "profiles") -> np.ndarray:
    """One profile per seed or window as a float64 array [S, L].

    Raises:
      ValueError: names the argument, and what is wrong with it.
    """
    return _check(profiles_SL, name, ("S", "L"))


def _check(values, name, axes):
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: must be an array of numbers [{', '.join(axes)}]") from None
    if array.ndim != len(axes) or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}: must be [{', '.join(axes)}] and not empty")
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        where = ", ".join(map(str, at))
        raise ValueError(f"{name}[{where}]={array[at]}: influence must be finite and not negative")
    return array


def _check_pair(measured_L, predicted_L) -> tuple[np.ndarray, np.ndarray]:
    measured_L, predicted_L = check_profile(measured_L, "measured"), check_profile(predicted_L, "predicted")
    if len(measured_L) != len(predicted_L):
        raise ValueError(f"predicted has {len(predicted_L)} positions: measured has {len(measured_L)}")
    return measured_L, predicted_L


def _check_stderr(stderr):
    if unknown := stderr.keys() - {"primacy", "recency", "anchor"}:
        raise ValueError(f"stderr has {', '.join(sorted(unknown))}: allowed are primacy, recency, anchor")
    for name, value in stderr.items():
        if value < 0:
            raise ValueError(f"stderr[{name!r}]={value}: must not be negative")
    return {f"{name}_se": float(stderr.get(name, math.nan)) for name in ("primacy", "recency", "anchor")}


def _ratio(above, below) -> float:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return float(np.float64(above) / np.float64(below))


def _level(profile_L, centre) -> bool:
    """Whether every tenth of a profile has a median within the margin of its middle, and its last three positions lie there."""
    tenths = np.array_split(profile_L, min(10, len(profile_L)))
    medians = np.array([*map(np.median, tenths), *profile_L[-3:]])
    return bool(np.all(medians <= (1 + MARGIN) * centre) and np.all(centre <= (1 + MARGIN) * medians))


def _beyond(ratio, stderr, sign) -> bool:
    """Whether a ratio is above 1 (sign 1) or below it (sign -1), by the margin and by 2 standard errors."""
    margin = ratio > 1 + MARGIN if sign > 0 else ratio < 1 / (1 + MARGIN)
    # In logs: a ratio of 800 ± 500 over few seeds is far above 1, though not by 2 standard errors of the ratio.
    return bool(margin and (math.isnan(stderr) or ratio == 0 or sign * math.log(ratio) * ratio > 2 * stderr))
