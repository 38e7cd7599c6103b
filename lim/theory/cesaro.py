"""The averaging operator at finite length: how much the read-out position feels of every position.

A profile costs O(L·H) time and O(L) memory, and each of its entries is right in relative terms however small it is:
every sum below runs over non-negative numbers, and nothing is ever subtracted.

Attention at birth is nearly uniform, so a causal layer averages over the past: M_ij = 1/i for j ≤ i, the Cesàro
matrix (Chowdhury, Lost in the Middle at Birth, arXiv:2603.10123). With a skip of weight s_l and a branch of weight b_l
layer l is N_l = s_l I + b_l M, and the influence of position j on position n is the entry (N_H … N_1)_nj.

Axes: L position (from 0 in arrays, from 1 in formulas), H layer (the first layer first), K number of hops, 0..H,
B block of a window, W position in it.
"""

import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, SupportsIndex

import numpy as np
import scipy
from numpy.typing import ArrayLike

Window = int | None | Sequence[int | None]  # one for all layers, or one per layer


def profile(length: int, strengths: ArrayLike, *, layers: int | None = None, causal: ArrayLike = 1.0, window: Window = None,
            read: int = -1) -> np.ndarray:  # fmt: skip
    """Row `read` of N_H … N_1 with N_l = (1-a_l) I + a_l M: a probability vector over positions.

    It is the law of a walk back from the read-out: in each layer stay (probability 1-a_l), or hop to a position drawn
    evenly from those the mask admits (a_l).

    Args:
      length: L, the number of positions.
      strengths: a, from 0 to 1: one number (then `layers` says how many layers), or one per layer.
      layers, causal, window, read: as in `operator_row`.

    Returns:
      p_L, float64, of sum 1.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """
    (strengths_H,) = per_layer(layers, high=1, strengths=strengths)
    return operator_row(length, 1 - strengths_H, strengths_H, causal=causal, window=window, read=read)


def operator_row(length: int, skip: ArrayLike, branch: ArrayLike, *, layers: int | None = None, causal: ArrayLike = 1.0,
                 window: Window = None, read: int = -1) -> np.ndarray:  # fmt: skip
    """Row `read` of N_H … N_1 with N_l = skip_l I + branch_l M_l, by running sums.

    With identity values (W_O W_V = I, one head), no norm and no MLP, √D times this row is the Frobenius norm of the
    Jacobian ∂(output at `read`)/∂(input at j). Errors are relative: at most H·L·1e-16 to first order, and 3e-14 seen
    at L = 10^6, H = 96.

    Args:
      length: L, the number of positions.
      skip, branch: weights of at least 0: one number, or one per layer.
      layers: H; needed where neither weight is given per layer. 0 layers leave the read-out position alone.
      causal: one number, or one per layer: 1 masks the future (Cesàro), 0 sees all (M_ij = 1/L); between, a future
        position weighs 1 - causal before the row is normalised.
      window: sliding window w, one number, or one per layer (None: no window): M_ij = 1/min(i, w) for i-w < j ≤ i.
        Needs causal=1 in its layers.
      read: index of the read-out position, from 0; negative counts from the end.

    Returns:
      row_L, float64, of sum Π (skip_l + branch_l). Entries under 1e-308 are lost to underflow.

    Raises:
      ValueError: names the argument, its value and what is allowed; or the row would leave float64's range.
    """
    skip_H, branch_H = per_layer(layers, skip=skip, branch=branch)
    masks = _masks(len(skip_H), causal, window)
    result_L, row_L, position_L = _start(length, read, masks)
    with np.errstate(divide="ignore", over="ignore"):
        log_sums = np.cumsum(np.log(skip_H + branch_H)[::-1])
    _refuse_overflow("skip, branch: the row's sum, Π (skip + branch),", log_sums.max(initial=0))
    averaged_L = np.empty_like(row_L)
    for s, b, mask in zip(skip_H[::-1], branch_H[::-1], masks[::-1]):
        _average(row_L, position_L, *mask, out_L=averaged_L)
        averaged_L *= b
        row_L *= s
        row_L += averaged_L
    return result_L


def second_moment_profile(length: int, skip: ArrayLike, branch: ArrayLike, gain: ArrayLike, *, layers: int | None = None,
                          causal: float = 1.0, window: int | None = None, read: int = -1) -> np.ndarray:  # fmt: skip
    """E‖∂(output at `read`)/∂(input at j)‖_F² / D for random zero-mean values, uniform attention, no norm, no MLP.

    Norms then add by depth and not by path. Layer l is skip_l x + branch_l M x G_l with E[G_l G_lᵀ] = gain_l I. Paths
    that hop in the same set S of layers share the weights Π_S G_l and add coherently, to
    Π_{l∈S} branch_l Π_{l∉S} skip_l (M^|S|)_nj; different sets are uncorrelated. Summed over the sets of each size,

      E‖·‖_F² / D = Σ_k e_k ((M^k)_nj)²,   e_k = coefficient of z^k in Π_l (skip_l² + gain_l branch_l² z),

    where equating the norm with the row of N_H … N_1 (identity values) would add all paths coherently.

    Args:
      gain: of at least 0: (D σ_V²)(n_heads d_head σ_O²) for weights of those variances, shared value heads or not;
        one number, or one per layer.
      causal, window: one mask for all layers, since the sum needs the powers of one M.
      length, skip, branch, layers, read: as in `operator_row`.

    Returns:
      moment_L, float64; its root is the influence, in units of √D. Entries under 1e-308 are lost to underflow.

    Raises:
      ValueError: names the argument, its value and what is allowed; or the result would leave float64's range.
    """
    for name, value in (("causal", causal), ("window", window)):
        if np.ndim(value):  # type: ignore[arg-type]  # None has no axis either
            raise ValueError(f"{name}={value}: one mask for all layers here, since the sum needs the powers of one M")
    skip_H, branch_H, gain_H = per_layer(layers, skip=skip, branch=branch, gain=gain)
    masks = _masks(1, causal, window)
    moment_L, reached_L, position_L = _start(length, read, masks)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        stay_H, hop_H = skip_H**2, gain_H * branch_H**2
        log_sum = np.sum(np.log(stay_H + hop_H))
    _refuse_overflow("skip, branch, gain: Π (skip² + gain branch²)", log_sum)
    row_L, averaged_L = reached_L.copy(), np.empty_like(reached_L)
    reached_L[:] = 0
    for amplitude in np.exp(log_coefficients(stay_H, hop_H) / 2):
        reached_L += (amplitude * row_L) ** 2
        _average(row_L, position_L, *masks[0], out_L=averaged_L)
        row_L, averaged_L = averaged_L, row_L
    return moment_L


def exact_row(length: int, strengths: Fraction | float | Sequence[Fraction | float], *, layers: int | None = None) -> list[Fraction]:
    """The causal `profile` of the last position in exact rationals, by its closed form; O(L²) big-number products.

    Cesàro matrices are Hausdorff matrices: N_H … N_1 has the moments μ_m = Π_l (1 - a_l + a_l/(m+1)), and

      (N_H … N_1)_nk = C(n-1,k-1) Σ_m (-1)^m C(n-k,m) μ_{k-1+m}.

    The order of the layers does not matter, as all N_l are polynomials in one M. The sum alternates, so it is of use in
    exact arithmetic only. As μ_m = E X^m for X of the continuum density (`lim.theory.density`), the row is the law of
    1 + Binomial(n-1, X): the finite profile is the continuum one, binomially smoothed.

    Args:
      strengths: Fractions, integers, or floats (taken at their exact binary value), from 0 to 1: one, or one per layer.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """
    n = integer("length", length, low=1)
    (checked_H,) = per_layer(layers, high=1, strengths=np.asarray(strengths, np.float64))
    given: Any = strengths  # np.ndim tells no type checker which it is
    a_H = [Fraction(a) for a in given] if np.ndim(given) else [Fraction(given)] * len(checked_H)
    moments = [math.prod((1 - a + a / (m + 1) for a in a_H), start=Fraction(1)) for m in range(n)]
    return [math.comb(n - 1, k - 1) * sum((-1) ** m * math.comb(n - k, m) * moments[k - 1 + m] for m in range(n - k + 1)) for k in range(1, n + 1)]


def log_coefficients(constant_H: ArrayLike, linear_H: ArrayLike) -> np.ndarray:
    """Logarithms of the coefficients of Π_l (constant_l + linear_l z), for numbers of at least 0: [K], K = 0..H.

    They would underflow (½^10000) or overflow as numbers. Their ratios do not: with odds o = linear/constant and
    r_k = e_k / e_{k-1}, one more factor turns r_k into r_{k-1} (r_k + o) / (r_{k-1} + o). As r falls with k (Newton),
    the two relative errors that this passes on have weights of sum at most 1, so errors grow by rounding alone,
    linearly in H. Summing log r away from the largest coefficient and fixing the scale by
    Σ_k e_k = Π_l (constant_l + linear_l) keeps the largest coefficients most accurate.

    Raises:
      ValueError: a ratio linear/constant, neither 0 nor infinite, lies outside 1e-290 .. 1e290.
    """
    constant_H, linear_H = np.asarray(constant_H, np.float64), np.asarray(linear_H, np.float64)
    sure_H = constant_H == 0
    with np.errstate(over="ignore"):
        odds = linear_H[~sure_H] / constant_H[~sure_H]
    odds = odds[linear_H[~sure_H] > 0]
    if not np.all((odds > 1e-290) & (odds < 1e290)):
        raise ValueError(f"odds of a hop are {odds.min()} to {odds.max()}: allowed are 0, 1e-290 to 1e290, and inf")
    log_ratio = np.log(_ratios(odds))
    top = np.count_nonzero(log_ratio >= 0)
    log_e = np.concatenate([-np.cumsum(log_ratio[:top][::-1])[::-1], [0.0], np.cumsum(log_ratio[top:])])
    with np.errstate(divide="ignore"):
        log_e += np.sum(np.log(constant_H + linear_H)) - scipy.special.logsumexp(log_e)
    log_e_K = np.full(len(constant_H) + 1, -np.inf)
    first = np.count_nonzero(sure_H)
    log_e_K[first : first + len(log_e)] = log_e
    return log_e_K


def per_layer(layers: int | None = None, *, high: float = math.inf, **values: ArrayLike) -> list[np.ndarray]:
    """Checks numbers from 0 to `high`, each one for all layers or one per layer, and returns each as float64 [H].

    Raises:
      ValueError: names the argument, its value and what is allowed; or the numbers of layers disagree.
    """
    arrays, sizes = [], {} if layers is None else {"layers": integer("layers", layers, low=0)}
    for name, value in values.items():
        array = np.asarray(value)
        if array.ndim > 1 or (array.size and array.dtype.kind not in "iuf"):
            raise ValueError(f"{name}={value!r}: must be a number, or one number per layer")
        array = array.astype(np.float64)
        if not np.all(np.isfinite(array) & (array >= 0) & (array <= high)):
            allowed = "of at least 0" if high == math.inf else f"from 0 to {high}"
            raise ValueError(f"{name}={value}: allowed are finite numbers {allowed}")  # type: ignore[str-bytes-safe]  # bytes are refused above
        if array.ndim:
            sizes[name] = array.size
        arrays.append(array)
    if not sizes:
        raise ValueError(f"layers=None: must be given where {', '.join(values)} is one number for all layers")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"numbers of layers disagree: {', '.join(f'{name} {size}' for name, size in sizes.items())}")
    (size,) = set(sizes.values())
    return [np.broadcast_to(array, (size,)) for array in arrays]


def _masks(layers, causal, window) -> list[tuple[float, int | None]]:
    """(causal, window) of each layer, checked."""
    (causal_H,) = per_layer(layers, high=1, causal=causal)
    windows = list(window) if np.ndim(window) else [window] * layers
    if len(windows) != layers:
        raise ValueError(f"window={window}: must be one number, or one for each of the {layers} layers")
    windows = [None if w is None else integer("window", w, low=1) for w in windows]
    for c, w in zip(causal_H, windows):
        if w is not None and c != 1:
            raise ValueError(f"window={w}: needs causal=1 in its layer, which has causal={c}")
    return list(zip(causal_H.tolist(), windows))


def _start(length, read, masks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The unit row at `read`; a view of it on the positions that can be reached; their numbers, from 1."""
    length = integer("length", length, low=1)
    n = integer("read", read, low=-length, high=length - 1) % length
    unit_L = np.zeros(length)
    unit_L[n] = 1
    reach = n + 1 if all(causal == 1 for causal, _ in masks) else length
    return unit_L, unit_L[:reach], np.arange(1.0, reach + 1)


def _average(row_L, position_L, causal, window, out_L) -> None:
    """out_L = row_L @ M: each position i shares its weight evenly among the positions it averages over."""
    if window is not None:
        np.minimum(position_L, window, out=out_L)
        np.divide(row_L, out_L, out=out_L)
        _window_sums(out_L, window)
        return
    if causal == 1:
        np.divide(row_L, position_L, out=out_L)
    else:
        np.multiply(position_L, causal, out=out_L)
        out_L += (1 - causal) * position_L[-1]
        np.divide(row_L, out_L, out=out_L)
    np.cumsum(out_L[::-1], out=out_L[::-1])
    if causal < 1:
        future = (1 - causal) * out_L[0]
        out_L *= causal
        out_L += future


def _window_sums(share_L, window) -> None:
    """share_j becomes Σ_{i=j}^{j+window-1} share_i.

    Differences of one running sum would cancel where the row is tiny. Cut into blocks as long as the window, each
    window is the end of one block and the start of the next, so two running sums inside blocks only ever add.
    """
    window = min(window, share_L.size)
    blocks_BW = np.zeros((-(-share_L.size // window), window))
    flat = blocks_BW.reshape(-1)[: share_L.size]
    flat[:] = share_L
    next_block_BW = np.cumsum(blocks_BW[1:, :-1], axis=1)
    np.cumsum(blocks_BW[:, ::-1], axis=1, out=blocks_BW[:, ::-1])
    blocks_BW[:-1, 1:] += next_block_BW
    share_L[:] = flat


def _ratios(odds) -> np.ndarray:
    """e_k / e_{k-1}, k = 1.., of the coefficients of Π (1 + odds_l z), for positive odds."""
    layers = len(odds)
    if layers and np.all(odds == odds[0]):
        k = np.arange(1, layers + 1)
        return odds[0] * (layers - k + 1) / k
    ratio = np.zeros(layers)
    for count, o in enumerate(odds):
        # The right-hand side reads the old ratios; r_0 is infinite, so r_1 gains o.
        before, here = ratio[:count], ratio[1 : count + 1]
        ratio[1 : count + 1] = before * ((here + o) / (before + o))
        ratio[0] += o
    return ratio


def _refuse_overflow(what, log_size) -> None:
    if not log_size <= 700:  # nan too: inf weights times 0
        raise ValueError(f"{what} reaches 10^{log_size / math.log(10):.0f}, beyond float64: scale the weights down")


def integer(name: str, value: SupportsIndex, *, low: int, high: int | None = None) -> int:
    """`value` as an int from `low` to `high`; a ValueError names what is wrong with it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)) or number < low or (high is not None and number > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}={value!r}: must be an integer {allowed}")
    return number
