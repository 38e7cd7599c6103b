"""What an experiment found, and the statistics it is made of: numbers with their errors over seeds.

Axes: L position, S seed.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lim import profile
from lim.config import Config
from lim.theory import paper
from lim.verdict import Statistic

SAME = math.log(1 + profile.MARGIN)  # 10 %: what `lim.profile.shape` takes for a difference between an end and the middle
TWICE = math.log(2)


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
    return Statistic(value, error if math.isfinite(error) else 0.0, words, log)


def mean_over_seeds(words: str, values_S: Sequence | np.ndarray, log: bool = False) -> Statistic:
    """The mean of one number per seed, and its standard error."""
    return Statistic(float(np.mean(values_S)), float(np.std(values_S, ddof=1) / math.sqrt(len(values_S))), words, log)


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
    return math.log(profile.middle(profile_L) / np.mean(profile_L))


def fitted_row(measured_L: ArrayLike, config: Config) -> np.ndarray:
    """The paper's operator at its best constant strength, in the profile's units."""
    return paper.fit(measured_L, config)[1]


def holdable(row_L: np.ndarray) -> np.ndarray:
    """Where float32 holds a profile: above 1e-30 of its largest entry."""
    return row_L > 1e-30 * row_L.max()
