"""The average over what a mask admits, applied to L×L matrices in blocks of rows on all cores.

Products with the causal or blended operator are running sums, a pass over the matrix instead of a product of matrices, and what is
computed from a block of rows stays in a core's cache; other masks multiply. Axes: L position, R a block of rows, B number of
the block.
"""

import collections
import concurrent.futures
import contextlib
import contextvars
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

BLOCK_ENTRIES = 2**17  # of a block of rows: 1 MB, small enough for the cache, large enough for two threads to pay


def in_blocks(work: Callable[[slice], Any], length: int, size: int | None = None) -> list:
    """[work(rows)] for consecutive slices of `size` rows, run by all cores; numpy lets them run side by side."""
    size = size or max(1, BLOCK_ENTRIES // length)
    blocks = [slice(start, min(start + size, length)) for start in range(0, length, size)]
    results, queue = [None] * len(blocks), iter(enumerate(blocks))

    def drain(_):
        for n, rows in queue:  # taking the next is atomic
            results[n] = work(rows)

    workers = min(_cores(), len(blocks))
    if workers == 1:
        drain(0)
        return results
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(drain, range(workers)))
    return results


def matrix(rows_of: Callable[[slice], np.ndarray], length: int, dtype: DTypeLike = np.float64) -> np.ndarray:
    """The matrix [L, L] whose rows `rows` (a slice) are rows_of(rows)."""
    out_LL = empty((length, length), dtype)

    def work(rows):
        out_LL[rows] = rows_of(rows)

    in_blocks(work, length)
    return out_LL


_POOL: contextvars.ContextVar = contextvars.ContextVar("pool", default=None)  # bytes → memory of that size that nobody uses


@contextlib.contextmanager
def recycled() -> Iterator[None]:
    """Inside, `empty` and `matrix` take the memory of earlier ones that are gone.

    An allocator gives large arrays back to the system and asks for them anew, page by page: at L = 2048 that took longer than
    the arithmetic of most passes.
    """
    token = _POOL.set(collections.defaultdict(list))
    try:
        yield
    finally:
        _POOL.reset(token)


class _Lent:
    """The owner of an array's memory: when the array and its views are gone, the memory returns to the pool."""

    def __init__(self, pool, shape, dtype):
        self.unused = pool[math.prod(shape) * np.dtype(dtype).itemsize]
        self.memory = self.unused.pop() if self.unused else np.empty(shape, dtype)
        self.__array_interface__ = {**self.memory.__array_interface__, "shape": shape, "typestr": np.dtype(dtype).str}

    def __del__(self):
        self.unused.append(self.memory)


def empty(shape: tuple[int, ...], dtype: DTypeLike = np.float64) -> np.ndarray:
    """np.empty, from `recycled` memory where there is some."""
    pool = _POOL.get()
    return np.empty(shape, dtype) if pool is None else np.asarray(_Lent(pool, shape, dtype))


class Mask:
    """M_ij = w_ij/n_i with w = 1 for j ≤ i and 1-causal beyond, n_i = Σ_j w_ij.

    Matrices are real or complex; "along" works on any rows of one, [..., R, L], "down" needs all.
    """

    def __init__(self, length: int, causal: float):
        self.causal = causal
        self.counts_L = causal * np.arange(1, length + 1.0) + (1 - causal) * length

    def weigh(self, x_RC: np.ndarray, rows: slice, columns: slice) -> None:
        """Replaces a block X of a matrix by M∘X, both slices with a start."""
        x_RC /= self.counts_L[rows, None]
        ahead = slice(max(rows.start, columns.start), columns.stop)  # nothing before the first row's own column
        positions_L = np.arange(len(self.counts_L))
        x_RC[:, ahead.start - columns.start :] *= np.where(positions_L[rows, None] >= positions_L[ahead], 1.0, 1 - self.causal)

    def average_along(self, x_RL: np.ndarray) -> np.ndarray:
        """X Mᵀ for rows of X."""
        sums_RL = np.cumsum(x_RL, axis=-1)
        if self.causal != 1:
            sums_RL = self.causal * sums_RL + (1 - self.causal) * sums_RL[..., -1:]
        sums_RL /= self.counts_L
        return sums_RL

    def spread_along(self, x_RL: np.ndarray) -> np.ndarray:
        """X M for rows of X."""
        x_RL = x_RL / self.counts_L
        sums_RL = np.empty_like(x_RL)
        np.cumsum(x_RL[..., ::-1], axis=-1, out=sums_RL[..., ::-1])
        if self.causal != 1:
            sums_RL = self.causal * sums_RL + (1 - self.causal) * sums_RL[..., :1]
        return sums_RL

    def average_down(self, x_LL: np.ndarray) -> np.ndarray:
        """M X."""
        averages_LL, sum_L = empty(x_LL.shape, x_LL.dtype), (1 - self.causal) * x_LL.sum(0)
        for i, count in enumerate(self.counts_L):  # row by row: numpy's cumsum down columns is ten times slower
            sum_L += self.causal * x_LL[i]
            np.divide(sum_L, count, out=averages_LL[i])
        return averages_LL

    def spread_down(self, x_SLL: np.ndarray) -> None:
        """Replaces every X of a stack by Mᵀ X."""
        sum_SL = (1 - self.causal) * np.einsum("i,sij->sj", 1 / self.counts_L, x_SLL)
        for i in reversed(range(len(self.counts_L))):
            sum_SL += self.causal / self.counts_L[i] * x_SLL[:, i]
            x_SLL[:, i] = sum_SL


class Dense:
    """The same of any M, held whole: weights w_ij that are divided by the sum of their row."""

    causal = None  # rows may see ahead: no product leaves columns out

    def __init__(self, w_LL: np.ndarray):
        self.m_LL = w_LL / w_LL.sum(1, keepdims=True)

    def weigh(self, x_RC: np.ndarray, rows: slice, columns: slice) -> None:
        """Replaces a block X of a matrix by M∘X."""
        x_RC *= self.m_LL[rows, columns]

    def average_along(self, x_RL: np.ndarray) -> np.ndarray:
        """X Mᵀ for rows of X."""
        return x_RL @ self.m_LL.T

    def spread_along(self, x_RL: np.ndarray) -> np.ndarray:
        """X M for rows of X."""
        return x_RL @ self.m_LL

    def average_down(self, x_LL: np.ndarray) -> np.ndarray:
        """M X."""
        return self.m_LL @ x_LL

    def spread_down(self, x_SLL: np.ndarray) -> None:
        """Replaces every X of a stack by Mᵀ X."""
        for x_LL in x_SLL:
            x_LL[:] = self.m_LL.T @ x_LL


def masks(length: int, *, causal: float = 1.0, window: float = math.inf, prefix: float = 0.0, alibi: float = 0.0, heads: int = 1) -> list[Mask | Dense]:
    """What each head averages over: one mask that all share, or with `alibi` one per head.

    w_ij = 1 for j ≤ i and 1 - causal beyond, 0 where |i - j| ≥ window, 1 for the first `prefix` positions in any case, all times
    exp(-alibi·slope·|i - j|), slope = 2^(-8n/heads) of head n = 1…heads where that is a power of two; other numbers of heads
    take the slopes of the next smaller power of two, then every other one of the next larger (ALiBi, Press et al., 2022).
    """
    if window >= length and not prefix and not alibi:
        return [Mask(length, causal)]
    i, j = np.arange(length)[:, None], np.arange(length)
    w_LL = np.where(j <= i, 1.0, 1 - causal) * (abs(i - j) < window)
    w_LL[:, : int(prefix)] = 1
    if not alibi:
        return [Dense(w_LL)]
    power = 2 ** int(math.log2(heads))
    exponents = [8 * n / power for n in range(1, power + 1)] + [4 * n / power for n in range(1, 2 * power, 2)]
    return [Dense(w_LL * np.exp(-alibi * 2**-exponent * abs(i - j))) for exponent in exponents[:heads]]


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
