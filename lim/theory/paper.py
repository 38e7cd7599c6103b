"""The paper's own prediction, a row of the averaging operator, for a network under switches, and its best fit.

The paper (Chowdhury 2026, arXiv:2603.10123) takes attention at birth for the Cesàro average M and a block for
(1-a) I + a M. It has no scale of its own and sees neither norms nor MLPs: compare shapes.
"""

import math

import numpy as np
import scipy
from numpy.typing import ArrayLike

from lim.config import Config
from lim.switches import Switches
from lim.theory import averaging, cesaro


def strengths(config: Config, switches: Switches) -> np.ndarray:
    """The strength a of each layer that the switches imply, branch/(skip + branch), [H].

    A skip of weight s beside a branch of weight 1 has a = 1/(1+s): ½ for the standard block, 1 without residual;
    under `alpha`, a is alpha.
    """
    if switches.alpha is not None:
        return np.broadcast_to(np.asarray(switches.alpha, np.float64), config.layers)
    skip = 1.0 if switches.residual is None else np.asarray(switches.residual, np.float64)
    return np.broadcast_to(1 / (1 + skip), config.layers)


def predict(config: Config, length: int, switches: Switches = Switches(), *, source: int = 0, read: int = -1) -> np.ndarray:
    """The paper's profile: row `read` of Π ((1-a_l) I + a_l M_l) over blocks source..layers-1, of sum 1, [L].

    M_l is what the layer's heads average over at birth: the Cesàro matrix under the causal mask, or as `lim.theory.averaging.masks`
    has it; with `alibi` the mean over heads.

    Args:
      config: a `lim.Config`.
      length: L.
      switches: those of the mask, `residual` and `alpha` matter; the operator knows no other.
      source: the block whose input is perturbed.
      read: the position read out.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """
    return _operator(config, length, switches, source, read)(strengths(config, switches)[source:])


def _operator(config, length, switches, source, read):
    """The function from strengths, [H], to the row of sum 1, [L]."""
    defaults = dict(causal=1.0, window=math.inf, prefix=0.0, alibi=0.0)
    given = {name: default if getattr(switches, name) is None else getattr(switches, name) for name, default in defaults.items()}
    each_H = [dict(zip(given, numbers)) for numbers in zip(*(np.broadcast_to(v, config.layers).tolist() for v in given.values()))][source:]
    if all(layer["window"] >= length and not layer["prefix"] and not layer["alibi"] for layer in each_H):
        return lambda a_H: cesaro.profile(length, a_H, causal=[layer["causal"] for layer in each_H], read=read)
    made = {tuple(layer.values()): averaging.masks(length, heads=config.heads, **layer) for layer in each_H}
    masks_H = [made[tuple(layer.values())] for layer in each_H]

    def row(a_H):
        row_L = np.zeros(length)
        row_L[read] = 1
        for a, masks in zip(a_H[::-1], masks_H[::-1]):
            row_L = (1 - a) * row_L + a * np.mean([mask.spread_along(row_L) for mask in masks], axis=0)
        return row_L

    return row


def fit(profile_L: ArrayLike, config: Config, switches: Switches = Switches(), *, source: int = 0, read: int = -1) -> tuple[float, np.ndarray]:
    """The constant strength whose operator, times a scale, is nearest to a profile in log distance.

    Minimises the root mean square over positions of the log ratio after the best scale, over a in (0, 1]: the best that
    one number can do in that measure. Positions where the profile is 0 are left out.

    Args:
      profile_L: a measured profile up to the read-out, [L].
      config, switches, source, read: of the network that was measured, as `predict` takes them; the strength is not taken from them.

    Returns:
      (a, scaled_L): the strength, and the fitted profile in the profile's own units. (nan, nan) if the profile is 0.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """
    profile_L = np.asarray(profile_L, np.float64)
    seen_L = profile_L > 0
    if not seen_L.any():
        return np.nan, np.full_like(profile_L, np.nan)

    operator = _operator(config, len(profile_L), switches, source, read)

    def log_ratio(strength):
        row_L = operator(np.full(config.layers - source, strength))
        return row_L, np.log(profile_L[seen_L]) - np.log(np.maximum(row_L[seen_L], 1e-300))

    def misfit(strength):
        return np.std(log_ratio(strength)[1])

    # A scan first: the misfit has two basins when both ends cannot be met at once.
    grid = np.linspace(-9, 9, 73)  # logits of the strength, which do not reach 1, all hops and no skip
    best = grid[np.argmin([misfit(scipy.special.expit(g)) for g in grid])]
    found = scipy.optimize.minimize_scalar(lambda logit: misfit(scipy.special.expit(logit)), bounds=(best - 0.25, best + 0.25),
                                           method="bounded", options=dict(xatol=1e-6))  # fmt: skip
    strength = min(float(scipy.special.expit(found.x)), 1.0, key=misfit)
    row_L, ratio = log_ratio(strength)
    return strength, row_L * np.exp(ratio.mean())
