"""The paper's own prediction, a row of the averaging operator, for a network under switches, and its best fit.

The paper (Chowdhury 2026, arXiv:2603.10123) takes attention at birth for the Cesàro average M and a block for
(1-a) I + a M. It has no scale of its own and sees neither norms nor MLPs: compare shapes.
"""

import numpy as np
import scipy.optimize

from lim.theory import cesaro


def strengths(config, switches) -> np.ndarray:
    """The strength a of each layer that the switches imply, branch/(skip + branch), [H].

    A skip of weight s beside a branch of weight 1 has a = 1/(1+s): ½ for the standard block, 1 without residual;
    under `alpha`, a is alpha.
    """
    if switches.alpha is not None:
        return np.broadcast_to(np.asarray(switches.alpha, np.float64), config.layers)
    skip = 1.0 if switches.residual is None else np.asarray(switches.residual, np.float64)
    return np.broadcast_to(1 / (1 + skip), config.layers)


def predict(config, length, switches, *, source=0, read=-1) -> np.ndarray:
    """The paper's profile: row `read` of Π ((1-a_l) I + a_l M) over blocks source..layers-1, of sum 1, [L].

    Args:
      config: a `lim.Config`.
      length: L.
      switches: `causal`, `residual` and `alpha` matter; the operator knows no other.
      source: the block whose input is perturbed.
      read: the position read out.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """
    causal = 1.0 if switches.causal is None else np.asarray(switches.causal, np.float64)
    causal_H = np.broadcast_to(causal, config.layers)[source:]
    return cesaro.profile(length, strengths(config, switches)[source:], causal=causal_H, read=read)


def fit(profile_L, layers: int, *, causal=1.0, read=-1) -> tuple[float, np.ndarray]:
    """The constant strength whose operator, times a scale, is nearest to a profile in log distance.

    Minimises the root mean square over positions of the log ratio after the best scale, over a in (0, 1): the best that
    one number can do. Positions where the profile is 0 are left out.

    Args:
      profile_L: a measured profile up to the read-out, [L].
      layers: H.
      causal, read: of the network that was measured.

    Returns:
      (a, scaled_L): the strength, and the fitted profile in the profile's own units. (nan, nan) if the profile is 0.

    Raises:
      ValueError: `layers` is not a positive integer, or as `lim.theory.cesaro.profile`.
    """
    profile_L = np.asarray(profile_L, np.float64)
    seen_L = profile_L > 0
    if not seen_L.any():
        return np.nan, np.full_like(profile_L, np.nan)

    def log_ratio(strength):
        row_L = cesaro.profile(len(profile_L), strength, layers=layers, causal=causal, read=read)
        return row_L, np.log(profile_L[seen_L]) - np.log(np.maximum(row_L[seen_L], 1e-300))

    # A scan first: the misfit has two basins when both ends cannot be met at once.
    spread = lambda logit: np.std(log_ratio(1 / (1 + np.exp(-logit)))[1])  # noqa: E731
    grid = np.linspace(-9, 9, 73)
    best = grid[np.argmin([spread(g) for g in grid])]
    found = scipy.optimize.minimize_scalar(spread, bounds=(best - 0.25, best + 0.25), method="bounded",
                                           options=dict(xatol=1e-6))  # fmt: skip
    strength = 1 / (1 + np.exp(-found.x))
    row_L, ratio = log_ratio(strength)
    return float(strength), row_L * np.exp(ratio.mean())
