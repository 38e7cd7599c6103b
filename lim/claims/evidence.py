"""What an experiment found, and the statistics it is made of: numbers with their errors over seeds.

Axes: L position, S seed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lim import profile
from lim.claims.lab import Ensemble
from lim.config import Config
from lim.switches import Switches
from lim.theory import paper
from lim.verdict import Statistic

SAME = math.log(1 + profile.MARGIN)  # 10 %: what `lim.profile.shape` takes for a difference between an end and the middle
TWICE = math.log(2)
LOGITS = np.linspace(-9, 9, 73)  # of the constant strengths at which the paper's operator is tried


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What an experiment found.

    Attributes:
      statistics: name → `Statistic`; those that no condition names are there to be read.
      figures: (what it shows, in words for those who cannot see it; the figure) each.
    """

    statistics: dict[str, Statistic]
    figures: tuple[tuple[str, Figure], ...]


def over_seeds(words: str, statistic: Callable[..., float], *ensembles: np.ndarray, log: bool = False) -> Statistic:
    """A statistic of root-mean-square profiles, with its jackknife error over seeds; several ensembles go seed by seed.

    Args:
      words, log: of the `Statistic`.
      statistic: takes one profile [L] per ensemble and returns a number.
      ensembles: arrays [S, L] of one shape; row s of each is of the same seed.
    """
    parts = len(ensembles)
    value, error = profile.jackknife(lambda joined: statistic(*np.split(joined, parts)), np.hstack(ensembles))
    return drawn(words, value, error, len(ensembles[0]), log)


def measured_or_theory(words: str, statistic: Callable[..., float], *ensembles: Ensemble, log: bool = False) -> Statistic:
    """`over_seeds`, or the kernel theory's number, in float64, where float32 does not hold what the statistic is made of."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if np.isfinite([statistic(*each) for each in zip(*(e.profiles_SL for e in ensembles), strict=True)]).all():
            return over_seeds(words, statistic, *(e.profiles_SL for e in ensembles), log=log)
        theories = [e.theory_L for e in ensembles if e.theory_L is not None]
        value = statistic(*theories) if len(theories) == len(ensembles) else math.nan
    if not math.isfinite(value):
        return Statistic(-math.inf, math.inf, f"{words} (below what float32 holds)", log)
    return Statistic(value, 0.0, f"{words} (kernel theory: float32 does not hold it)", log)


def mean_over_seeds(words: str, values_S: Sequence | np.ndarray, log: bool = False, least: float = 0.0) -> Statistic:
    """The mean of one number per seed, and its standard error, which is known to be at least `least`."""
    seeds = len(values_S)
    with np.errstate(invalid="ignore"):
        error = np.std(values_S, ddof=1) / math.sqrt(seeds) if seeds > 1 else math.nan
    return drawn(words, float(np.mean(values_S)), float(np.fmax(error, least)), seeds, log)


def over_networks(words: str, statistic: Callable[[np.ndarray], float], values_S: np.ndarray, log: bool = False) -> Statistic:
    """A function of what was found in all networks, an array whose first axis they are, with its jackknife error."""
    seeds = len(values_S)
    without_S = [statistic(np.delete(values_S, s, axis=0)) for s in range(seeds)]
    return drawn(words, statistic(values_S), math.sqrt(seeds - 1) * float(np.std(without_S)), seeds, log)


def share_of(words: str, hits: int, total: int) -> Statistic:
    """A share of few, with the spread that seeing so many leaves to it."""
    return Statistic(hits / total, share_error(hits / total, total), f"{words} ({hits} of {total})", freedom=max(total - 1, 1))


def share_error(share: float, total: int) -> float:
    """Standard deviation of Jeffreys' posterior of a share: above 0 also where all of them, or none, were seen."""
    return float(scipy.stats.beta.std(share * total + 0.5, (1 - share) * total + 0.5))


def drawn(words: str, value: float, error: float, seeds: int, log: bool = False) -> Statistic:
    """A `Statistic` of so many networks. Where they do not differ, or the value is not finite, its error is not known; never 0."""
    known = math.isfinite(error) and error > 0
    return Statistic(float(value), float(error) if known else math.inf, words, log, freedom=max(seeds - 1, 1))


def log_ratio(name: str) -> Callable[[ArrayLike], float]:
    """ln of one of `profile.ratios`: a function of a profile."""

    def statistic(profile_L):
        with np.errstate(divide="ignore"):
            return float(np.log(profile.ratios(profile_L)[name]))

    return statistic


def shape_distance(which: int = 0) -> Callable[[ArrayLike, ArrayLike], float]:
    """Median (0) or largest (1) |ln ratio| of two profiles after the best scale: a function of both."""
    return lambda one_L, other_L: profile.log_distance(one_L, other_L, free_scale=True)[which]


def middle_over_mean(profile_L: np.ndarray) -> float:
    """ln of influence in the middle over the mean influence: the density in the middle."""
    with np.errstate(divide="ignore"):
        return float(np.log(profile.middle(profile_L) / np.mean(profile_L)))


def at_best(distance: Callable[[np.ndarray, np.ndarray], float], config: Config) -> Callable[[np.ndarray], float]:
    """A distance of a profile from the paper's operator at the constant strength where that distance is least: a function of a profile.

    Each distance has a best strength of its own, and one that is best for another would make the paper look worse than it is.
    """

    def nearest(profile_L):
        at = lambda logit: distance(profile_L, operator_row(config, len(profile_L), float(logit)))  # noqa: E731
        each = [at(logit) for logit in LOGITS]
        best, step = int(np.argmin(each)), LOGITS[1] - LOGITS[0]
        bounds = LOGITS[best] - step, LOGITS[best] + step
        return min(each[best], float(scipy.optimize.minimize_scalar(at, bounds=bounds, method="bounded", options=dict(xatol=1e-3)).fun))

    return nearest


@functools.lru_cache(4096)
def operator_row(config: Config, length: int, logit: float) -> np.ndarray:
    """The paper's operator at a constant strength, given as its logit."""
    return paper.predict(config, length, Switches(alpha=float(scipy.special.expit(logit))))


def holdable(row_L: np.ndarray) -> np.ndarray:
    """Where float32 holds a profile: above 1e-30 of its largest entry."""
    return row_L > 1e-30 * row_L.max()
