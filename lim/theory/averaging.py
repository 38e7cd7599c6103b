"""The average over what a mask admits, applied to L×L matrices by running sums, in blocks of rows on all cores.

Products with the operator cost a pass over the matrix instead of a product of matrices, and what is computed from a
block of rows stays in a core's cache. Axes: L position, R a block of rows, B number of the block.
"""

import concurrent.futures
import os

import numpy as np

BLOCK_ENTRIES = 2**15  # of a block of rows: 256 kB, so that a handful of operands share a core's cache


def in_blocks(work, length: int) -> list:
    """[work(rows)] for consecutive slices of rows, run by all cores; numpy lets them run side by side."""
    size = _block_rows(length)
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


def matrix(rows_of, length: int) -> np.ndarray:
    """The float64 matrix [L, L] whose rows `rows` (a slice) are rows_of(rows)."""
    out_LL = np.empty((length, length))

    def work(rows):
        out_LL[rows] = rows_of(rows)

    in_blocks(work, length)
    return out_LL


class Mask:
    """M_ij = w_ij/n_i with w = 1 for j ≤ i and 1-causal beyond, n_i = Σ_j w_ij.

    Rows in and out are real or complex, with any leading axes: [..., R, L].
    """

    def __init__(self, length: int, causal: float):
        self.causal = causal
        self.counts_L = causal * np.arange(1, length + 1.0) + (1 - causal) * length

    def block(self, rows, columns) -> np.ndarray:
        """Entries of M itself."""
        positions_L = np.arange(len(self.counts_L))
        w = np.where(positions_L[rows, None] >= positions_L[columns], 1.0, 1 - self.causal)
        return w / self.counts_L[rows, None]

    def average_along(self, x_RL) -> np.ndarray:
        """X Mᵀ for rows of X."""
        sums_RL = np.cumsum(x_RL, axis=-1)
        if self.causal != 1:
            sums_RL = self.causal * sums_RL + (1 - self.causal) * sums_RL[..., -1:]
        sums_RL /= self.counts_L
        return sums_RL

    def spread_along(self, x_RL) -> np.ndarray:
        """X M for rows of X."""
        x_RL = x_RL / self.counts_L
        sums_RL = np.empty_like(x_RL)
        np.cumsum(x_RL[..., ::-1], axis=-1, out=sums_RL[..., ::-1])
        if self.causal != 1:
            sums_RL = self.causal * sums_RL + (1 - self.causal) * sums_RL[..., :1]
        return sums_RL

    def average_down(self, x_LL, use):
        """Calls use(rows, rows of M X) for every block."""
        ones_L = np.ones(len(self.counts_L))
        self._down(x_LL, ones_L, lambda rows, sums_RL: use(rows, sums_RL / self.counts_L[rows, None]), reverse=False)

    def spread_down(self, x_LL, use):
        """Calls use(rows, rows of Mᵀ X) for every block."""
        self._down(x_LL, 1 / self.counts_L, use, reverse=True)

    def _down(self, x_LL, weights_L, use, reverse):
        """Running weighted sums down the columns: the sum of each block first, so that each knows where to start."""
        length = len(weights_L)
        sums_BL = np.array(in_blocks(lambda rows: weights_L[rows] @ x_LL[..., rows, :], length))
        none_BL = np.zeros_like(sums_BL[:1])
        # Shifted, not until - own: entries may differ by many decades, and a difference would drown the small ones.
        if reverse:
            before_BL = np.concatenate([none_BL, np.cumsum(sums_BL[:0:-1], axis=0)])[::-1]
        else:
            before_BL = np.concatenate([none_BL, np.cumsum(sums_BL[:-1], axis=0)])

        def work(rows):
            sums_RL = x_LL[..., rows, :] * weights_L[rows, None]
            order = range(rows.start, rows.stop)
            last_L = before_BL[rows.start // _block_rows(length)]
            for r in reversed(order) if reverse else order:  # numpy's cumsum down columns is ten times slower
                row_L = sums_RL[..., r - rows.start, :]
                last_L = np.add(last_L, row_L, out=row_L)
            if self.causal != 1:
                sums_RL = self.causal * sums_RL + (1 - self.causal) * sums_BL.sum(0)[..., None, :]
            use(rows, sums_RL)

        in_blocks(work, length)


def _block_rows(length):
    return max(1, BLOCK_ENTRIES // length)


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
