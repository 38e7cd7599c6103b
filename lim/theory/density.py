"""The continuum limit of the averaging operator: the density of influence over the context, in closed form.

Everything is computed in logarithms and in the depth t = ln(1/x) of the relative position x = j/L, so it holds from one
layer to ten thousand, and from the last token (t = 0) to positions far below x = 1e-300 (t = 691).

A hop to a uniform position in the past adds an Exp(1) step to t, so after k hops t ~ Gamma(k, 1); and the number of
hops K has the Poisson-binomial law of the layers' strengths a_1..a_H (binomial where they are equal):

  ρ(x) = P(K=0) δ(1-x) + Σ_{k≥1} P(K=k) t^{k-1}/(k-1)!

(Chowdhury, Lost in the Middle at Birth, arXiv:2603.10123, has the constant strength.) The delta is the recency anchor.
The rest, the smooth part, is a power series in t without a negative coefficient, so it falls monotonically in x for any
strengths: it is lowest at x → 1, for the next-to-last token, where it is P(K=1), for a constant strength
H a (1-a)^{H-1}. A U-shape is this slope with the anchor at its foot. How deep foot and middle lie depends on the
strengths:

* a = 1: ρ = t^{H-1}/(H-1)!, factorial in H, and no anchor;
* constant a < 1: a (1-a)^{H-1} L^{(1)}_{H-1}(-y) with y = a t/(1-a), a generalised Laguerre polynomial; for large H
  e^{-y/2} (1-a)^H √(λ/t) I_1(2√(λt)) with λ = aH/(1-a) (Perron), exponential in H;
* a_l = 1/l, as in a pre-norm network whose stream grows: P(K=1) = 1/H, and at fixed x roughly a power of H.

At finite length (`lim.theory.cesaro`) the density is smoothed binomially. For L = 2048, H = 24 it is within 1 % at the
middle for a ≤ 0.5, but up to 66 % off in the middle half at a = 1, and a factor 5 at the first token at a = 0.5. Take
numbers from there and shapes from here.

Axes: T values of t (flattened), K number of hops (0..H), H layer, L position.
"""

from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike

from lim.theory.cesaro import integer, log_coefficients, per_layer


def log_hops(strengths: ArrayLike, *, layers: int | None = None) -> np.ndarray:
    """ln P(K=k), k = 0..H: the Poisson-binomial law of the number of layers that hop, accurate in both tails.

    Args:
      strengths: a, from 0 to 1: one number (then `layers` says how many layers), or one per layer.

    Returns:
      [H + 1], float64, -inf where impossible.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """
    (strengths_H,) = per_layer(layers, high=1, strengths=strengths)
    return log_coefficients(1 - strengths_H, strengths_H)


def expected_hops(strengths: ArrayLike, *, layers: int | None = None) -> float:
    """E K = Σ a_l; strengths, layers as in `log_hops`. The mean of t is the same number."""
    (strengths_H,) = per_layer(layers, high=1, strengths=strengths)
    return float(strengths_H.sum())


def log_anchor(strengths: ArrayLike, *, layers: int | None = None) -> float:
    """ln Π (1-a_l), the logarithm of the mass at x = 1; -inf if a layer always hops. Arguments as in `log_hops`."""
    (strengths_H,) = per_layer(layers, high=1, strengths=strengths)
    with np.errstate(divide="ignore"):
        return float(np.log1p(-strengths_H).sum())


def anchor(strengths: ArrayLike, *, layers: int | None = None) -> float:
    """Π (1-a_l), the mass at x = 1; 0 where it is under 1e-308 (use `log_anchor`). Arguments as in `log_hops`."""
    return float(np.exp(log_anchor(strengths, layers=layers)))


def log_density(t: ArrayLike, strengths: ArrayLike, *, layers: int | None = None) -> np.ndarray:
    """ln of the smooth part of ρ, per unit of x, at x = e^{-t}; add -t for the density per unit of t.

    The logarithm is right to a few ulp of the largest that enters, H ln H or H |ln t|: 1e-11 at H = 10^4, t ≤ 10^4.

    Args:
      t: ln(1/x), of any shape, from 0 (x = 1, without the anchor) to inf (x = 0).
      strengths, layers: as in `log_hops`.

    Returns:
      float64 of the shape of t; -inf if no layer hops, +inf at t = inf if more than one can.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """
    log_hops_K = log_hops(strengths, layers=layers)

    def log_sum(t_T1, k, log_weight):
        return scipy.special.logsumexp(log_weight - scipy.special.gammaln(k) + scipy.special.xlogy(k - 1, t_T1), axis=-1)

    return _over_hops(log_sum, t, log_hops_K, empty=-np.inf)


def cdf(t: ArrayLike, strengths: ArrayLike, *, layers: int | None = None) -> np.ndarray:
    """P(X ≤ x) at x = e^{-t}, the share of influence on the positions up to x: Σ_{k≥1} P(K=k) Q(k, t), and 1 at t = 0.

    Q is the regularised upper incomplete gamma function. The anchor counts at x = 1 alone. Terms under 1e-308 are lost.

    Args:
      t: ln(1/x), of any shape, from 0 to inf.
      strengths, layers: as in `log_hops`.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """

    def weighted_sum(t_T1, k, log_weight):
        return scipy.special.gammaincc(k, t_T1) @ np.exp(log_weight)

    log_hops_K = log_hops(strengths, layers=layers)
    log_hops_K[log_hops_K < -745] = -np.inf  # weights that are 0 in float64 need no incomplete gamma function
    smooth = _over_hops(weighted_sum, t, log_hops_K, empty=0.0)
    return np.where(np.asarray(t) == 0, 1.0, smooth)


def continuum_profile(length: int, strengths: ArrayLike, *, layers: int | None = None) -> np.ndarray:
    """What the continuum predicts for each of L tokens, to lay beside `lim.theory.cesaro.profile`.

    Token j gets the density at the middle of its cell, x = (j - ½)/L, over L; the last token the anchor too. The first
    cell's integral is larger than that (the density diverges at x = 0), so the sum is under 1.

    Args:
      length: L, the number of positions.
      strengths, layers: as in `log_hops`.

    Returns:
      p_L, float64.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """
    length = integer("length", length, low=1)
    t_L = -np.log((np.arange(length) + 0.5) / length)
    p_L = np.exp(log_density(t_L, strengths, layers=layers)) / length
    p_L[-1] += anchor(strengths, layers=layers)
    return p_L


class Valley(NamedTuple):
    """How deep the dead zone is. The lowest point of the smooth part is always x → 1, next to the anchor.

    Attributes:
      log_anchor: ln of the mass at x = 1.
      log_lowest: ln of the smooth density at x → 1, ln P(K=1).
      log_middle: ln of the smooth density at x = ½.
    """

    log_anchor: float
    log_lowest: float
    log_middle: float

    def anchor_over_middle(self, length: int) -> float:
        """The anchor over the middle token's influence at L = length; a U is visible only where it is well above 1."""
        return float(np.exp(self.log_anchor - self.log_middle + np.log(integer("length", length, low=1))))


def valley(strengths: ArrayLike, *, layers: int | None = None) -> Valley:
    """Anchor, lowest point and middle of the density; arguments and errors as in `log_hops`."""
    lowest, middle = log_density([0.0, np.log(2)], strengths, layers=layers)
    return Valley(log_anchor(strengths, layers=layers), float(lowest), float(middle))


def _over_hops(function, t, log_hops_K, empty) -> np.ndarray:
    """function(t_T1, k, ln P(K=k)) over the possible k ≥ 1, for all t, in chunks of bounded memory."""
    try:
        t = np.asarray(t, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"t={t!r}: must be numbers of at least 0, t = ln(1/x)") from None
    if not np.all(t >= 0):
        raise ValueError(f"t={t}: allowed are numbers of at least 0, t = ln(1/x)")
    (k,) = np.nonzero(log_hops_K[1:] > -np.inf)
    k += 1
    if not k.size:
        return np.full(t.shape, empty)
    chunks = np.array_split(t.reshape(-1, 1), max(1, t.size * k.size // 2**20))
    return np.concatenate([function(t_T1, k, log_hops_K[k]) for t_T1 in chunks]).reshape(t.shape)
