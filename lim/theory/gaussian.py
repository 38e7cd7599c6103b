"""Gaussian expectations of the MLP activations: means over one preactivation, and over correlated pairs of them.

Every integral is a trapezoid sum and every pair expectation a Hermite series, both with an error that is known and
stated; nothing is tabulated or sampled. Axes: L position, K order of a Hermite polynomial, Q quadrature node.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from lim.theory.averaging import empty, in_blocks, matrix

Function = Callable[[np.ndarray], np.ndarray]  # vectorised
# Trapezoid sums over the standard normal. For f analytic in |Im u| < d and u = √v·ξ the error falls as
# exp(-2π·d/(step·√v)); the nearest pole of SiLU is at d = π, that of the tanh-GELU at d = 2.8, so up to v = 20 even
# fourth powers are right to rounding. Cut at |ξ| = 13, where √density is 4e-19.
_STEP = 1 / 16
_NODES_Q = np.arange(-13, 13 + _STEP / 2, _STEP)
_WEIGHTS_Q = _STEP * np.exp(-(_NODES_Q**2) / 2) / math.sqrt(2 * math.pi)
MAX_VARIANCE = 20.0

_TAIL = 2e-14  # share of E[f²] that the cut series may leave out
_MAX_ORDER = 1024


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation u·(1 + tanh w(u))/2 with an odd gate w, which both SiLU and the tanh-GELU are.

    It is u/2 plus an even function, and its slope ½ plus an odd one, so a Hermite series of either needs one parity.

    Attributes:
      gate: w.
      gate_slope: w'.
    """

    gate: Callable
    gate_slope: Callable

    def __call__(self, u: np.ndarray) -> np.ndarray:
        return u / 2 + self.even(u)

    def slope(self, u: np.ndarray) -> np.ndarray:
        return 0.5 + self.odd(u)

    def even(self, u: np.ndarray) -> np.ndarray:
        """The activation less u/2."""
        return u / 2 * np.tanh(self.gate(u))

    def odd(self, u: np.ndarray) -> np.ndarray:
        """The slope less ½."""
        tanh = np.tanh(self.gate(u))
        return tanh / 2 + u / 2 * (1 - tanh**2) * self.gate_slope(u)


SILU = Activation(gate=lambda u: u / 2, gate_slope=lambda u: 0.5)
_ROOT = math.sqrt(2 / math.pi)
GELU = Activation(gate=lambda u: _ROOT * (u + 0.044715 * u**3), gate_slope=lambda u: _ROOT * (1 + 3 * 0.044715 * u**2))


def mean(f: Function, variance: ArrayLike) -> np.ndarray:
    """E[f(u)] for u normal with mean 0 and each of the given variances.

    Args:
      f: vectorised function.
      variance: any shape, up to MAX_VARIANCE.

    Returns:
      The same shape.

    Raises:
      ValueError: a variance is negative, above MAX_VARIANCE or not finite.
    """
    return f(np.sqrt(_checked(variance))[..., None] * _NODES_Q) @ _WEIGHTS_Q


def hermite_coefficients(f: Function, odd: bool, variance_L: ArrayLike, correlation: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coefficients of f(√v·ξ) in the orthonormal Hermite polynomials of f's parity, enough of them for full precision.

    a_k(v) = E[f(√v ξ) He_k(ξ)]/√k!, and Σ_k a_k² = E[f²] (Parseval), so what a cut leaves out is known: orders are
    added until the share of E[f²] that is missing, times |correlation|^order, is below 2e-14 at every variance. For
    SiLU at correlation 1 that takes 12 coefficients at v = 0.36 (Qwen2-0.5B), 21 at v = 1, 131 at v = 10.

    Args:
      f: vectorised function with a definite parity.
      odd: whether f is odd (else even).
      variance_L: [L].
      correlation: the largest at which the series will be summed.

    Returns:
      coefficients_LK: column k belongs to the order 2k + odd.
      missing_K: largest share of E[f²] that the columns up to k leave out.
      second_L: E[f²].

    Raises:
      ValueError: a variance is out of range, or 1024 orders do not suffice.
    """
    # The integrands are even, so nodes of ξ ≥ 0 do, with twice their weights.
    half = len(_NODES_Q) // 2
    nodes_Q, weights_Q = _NODES_Q[half:], 2 * _WEIGHTS_Q[half:]
    weights_Q[0] /= 2
    deviation_L = np.sqrt(_checked(variance_L))
    f_LQ, second_L = empty((len(deviation_L), len(nodes_Q))), np.empty_like(deviation_L)

    def sample(rows):
        f_RQ = f(deviation_L[rows, None] * nodes_Q)
        second_L[rows] = f_RQ**2 @ weights_Q
        f_LQ[rows] = f_RQ * weights_Q

    in_blocks(sample, len(deviation_L))
    previous, current = np.zeros_like(nodes_Q), np.ones_like(nodes_Q)
    captured_L, columns, missing = np.zeros_like(second_L), [], []
    for order in range(_MAX_ORDER):
        if order % 2 == odd:
            columns.append(f_LQ @ current)
            captured_L += columns[-1] ** 2
            missing.append(np.max((second_L - captured_L) / second_L))
            if missing[-1] * correlation ** (order + 2) <= _TAIL:
                return np.stack(columns, axis=1), np.array(missing), second_L
        # √(k+1) h_{k+1} = ξ h_k - √k h_{k-1} for the orthonormal h_k = He_k/√k!
        previous, current = current, (nodes_Q * current - math.sqrt(order) * previous) / math.sqrt(order + 1)
    raise ValueError(f"variance={np.max(variance_L):.3g}: pairs of correlation {correlation:.6f} need more than {_MAX_ORDER} orders")


def pair_mean(f: Function, odd: bool, variance_L: ArrayLike, correlation_LL: np.ndarray) -> np.ndarray:
    """E[f(u_i) f(u_j)] for jointly normal u with the given variances and correlations, by Mehler's formula.

    For a standard bivariate normal pair E[He_k(ξ) He_l(ξ')] = k!·ρ^k·[k=l], hence E[f(u_i) f(u_j)] =
    Σ_k a_k(v_i) a_k(v_j) ρ_ij^k. By Cauchy-Schwarz what the cut leaves out is below 2e-14·√(E[f(u_i)²] E[f(u_j)²]),
    whatever the correlation; the diagonal, where u_i = u_j, is E[f(u_i)²] itself.

    Args:
      f, odd, variance_L: as `hermite_coefficients` takes them.
      correlation_LL: [L, L], 1 on the diagonal.

    Returns:
      [L, L].

    Raises:
      ValueError: as `hermite_coefficients`.
    """
    length = len(correlation_LL)
    square_LL = matrix(lambda rows: correlation_LL[rows] ** 2, length)
    np.fill_diagonal(square_LL, 0.0)
    largest = min(1.0, math.sqrt(square_LL.max()))
    coefficients_LK, missing_K, second_L = hermite_coefficients(f, odd, variance_L, largest)
    row_KL = np.ascontiguousarray(coefficients_LK.T)
    orders_K = 2 * np.arange(len(row_KL)) + odd
    result_LL = empty(square_LL.shape)

    def lower(rows):  # and its mirror image
        start, stop = rows.start, rows.stop
        square, total = square_LL[rows, :stop].copy(), np.empty((stop - start, stop))
        remainder_K = missing_K * min(1.0, square.max()) ** ((orders_K + 2) / 2)
        last = int(np.argmax(remainder_K <= _TAIL))
        np.multiply(coefficients_LK[rows, last, None], row_KL[last, :stop], out=total)
        term = np.empty_like(total)
        for k in range(last - 1, -1, -1):  # Horner in ρ²
            total *= square
            total += np.multiply(coefficients_LK[rows, k, None], row_KL[k, :stop], out=term)
        if odd:
            total *= correlation_LL[rows, :stop]
        result_LL[rows, :stop] = total
        result_LL[:start, rows] = total[:, :start].T

    in_blocks(lower, length)
    np.fill_diagonal(result_LL, second_L)
    return result_LL


def _checked(variance) -> np.ndarray:
    variance = np.asarray(variance, np.float64)
    if not np.all((variance >= 0) & (variance <= MAX_VARIANCE)):
        raise ValueError(f"variance={variance.max():.3g}: preactivations need a variance from 0 to {MAX_VARIANCE:g}")
    return variance
