"""Softmax attention with grouped key/value heads, the switches that act inside it, and a pullback without L×L arrays.

Attention of all rows works tile by tile, forward with a running maximum and sum (Milakov and Gimelshein, 2018;
FlashAttention, Dao et al., 2022). It keeps each row's log-normaliser, from which its pullback finds every tile's
probabilities again: once for all cotangents that are pulled back side by side. Tiles that the mask excludes are skipped.

Axes: Q query rows, S source positions, K key/value heads, G query heads that share one of them, E head width,
T tiles of rows or of sources, M = (G, rows of a tile). Tiles stand transposed, [K, S, M], so that no product of the
pullback has to rearrange one, alone or batched.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Finite, so that a masked score never makes inf - inf in a pullback; exp of it is exactly 0 beside any real score.
MASKED = -1e30
# The name of what a pullback needs and had better not compute again; see `Decoder.stream`.
KEPT = "kept"
TILE = 256  # rows and sources: large enough for fast products, small enough that a tile stays in the cache


def admitted(rows_Q, length, causal=None, window=None, dtype=jnp.float32):
    """Weight w_QS of each source position before normalisation: 1 up to the row, 1 - causal beyond it.

    With `causal` None the weight beyond the row is 0, and with a `window` also that of all but the last `window`
    positions up to the row. Rows of w divided by their sums are the averaging matrix M.
    """
    return _weights(rows_Q[:, None], jnp.arange(length)[None, :], causal, window).astype(dtype)


def _weights(rows, sources, causal, window):
    past = rows >= sources
    if window is not None:
        past &= rows - sources < window
    return jnp.where(past, 1.0, 0.0 if causal is None else 1 - causal)


def attention_weights(q_QKGE, k_SKE, rows_Q, *, causal=None, uniform=None, score_path=None, window=None):
    """What each query row attends to, [K, G, Q, S]; the arguments are those of `attend`."""
    w_QS = admitted(rows_Q, len(k_SKE), causal, window, q_QKGE.dtype)
    scores_KGQS = jnp.einsum("QKGE,SKE->KGQS", q_QKGE, k_SKE) * q_QKGE.shape[-1] ** -0.5
    if score_path is not None:
        still = jax.lax.stop_gradient(scores_KGQS)
        scores_KGQS = still + score_path * (scores_KGQS - still)
    # log(w) with both branches finite, so that the pullback to `causal` is too.
    bias_QS = jnp.where(w_QS > 0, jnp.log(jnp.where(w_QS > 0, w_QS, 1)), MASKED)
    weights_KGQS = jax.nn.softmax(jnp.where(w_QS > 0, scores_KGQS + bias_QS, MASKED), axis=-1)
    if uniform is not None:
        mean_QS = w_QS / w_QS.sum(-1, keepdims=True)
        weights_KGQS = uniform * mean_QS + (1 - uniform) * weights_KGQS
    return weights_KGQS


def attend(q_QKGE, k_SKE, v_SKE, rows_Q=None, *, causal=None, uniform=None, score_path=None, window=None, tile=TILE):
    """Softmax attention of some query rows over all source positions.

    Args:
      q_QKGE: queries of the rows `rows_Q` (their positions in the sequence).
      k_SKE, v_SKE: keys and values of every position.
      rows_Q: positions of the query rows, whose weights are then held whole; None for every position in order, which
        goes tile by tile.
      causal, uniform, score_path: traced numbers of `Switches` (`uniform_attention` for uniform), or None. Tile by tile
        they have no derivative: asking for one is refused.
      window: how many positions a row attends to, itself included, or None for all before it; only with causal=None.
      tile: rows and sources per tile.

    Returns:
      The mixed values, [Q, K, G, E].

    Raises:
      ValueError: a window beside a number for causal, or a derivative by one of the numbers tile by tile.
    """
    if window is not None and causal is not None:
        raise ValueError(f"window={window}: needs causal=None")
    numbers = dict(causal=causal, uniform=uniform, score_path=score_path)
    if rows_Q is not None:
        weights_KGQS = attention_weights(q_QKGE, k_SKE, rows_Q, window=window, **numbers)
        return jnp.einsum("KGQS,SKE->QKGE", weights_KGQS, v_SKE)
    return _tiled(window, tile, q_QKGE, k_SKE, v_SKE, numbers)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tiled(window, tile, q_QKGE, k_SKE, v_SKE, numbers):
    return _forward(window, tile, q_QKGE, k_SKE, v_SKE, numbers)[0]


def _tiled_vjp(window, tile, q_QKGE, k_SKE, v_SKE, numbers):
    if any(number.perturbed for number in numbers.values() if number is not None):
        names = [name for name, number in numbers.items() if number is not None and number.perturbed]
        raise ValueError(f"{', '.join(names)}: no derivative tile by tile; give rows_Q=jnp.arange(L) for the plain form, which has one")
    return _forward(window, tile, *jax.tree.map(lambda p: p.value, (q_QKGE, k_SKE, v_SKE, numbers)))


class _Tiles:
    """How a sequence falls into equal tiles, and which weights each holds. Padding comes last."""

    def __init__(self, length, window, tile, causal):
        self.length, self.window, self.causal = length, window, causal
        self.count = math.ceil(length / tile)
        self.size = math.ceil(length / self.count)

    def split(self, x_QKGE):
        """[Q, K, G, E] as [T, K, M, E]."""
        _, kv_heads, group, width = x_QKGE.shape
        x_QKGE = jnp.pad(x_QKGE, [(0, self.count * self.size - self.length), (0, 0), (0, 0), (0, 0)])
        x_TQKGE = x_QKGE.reshape(self.count, self.size, kv_heads, group, width)
        return x_TQKGE.transpose(0, 2, 3, 1, 4).reshape(self.count, kv_heads, group * self.size, width)

    def join(self, x_TKME, group):
        """[T, K, M, E] as [Q, K, G, E]."""
        _, kv_heads, _, width = x_TKME.shape
        x_TKGQE = x_TKME.reshape(self.count, kv_heads, group, self.size, width)
        return x_TKGQE.transpose(0, 3, 1, 2, 4).reshape(-1, kv_heads, group, width)[: self.length]

    def sources_of(self, t):
        """First and last-plus-one tile of sources that tile t of rows attends to."""
        if self.causal is not None:
            return 0, self.count
        if self.window is None:
            return 0, t + 1
        return jnp.maximum(t * self.size - self.window + 1, 0) // self.size, t + 1

    def weights(self, t, s, group):
        """w of the rows of tile t and the sources of tile s, [S, M]."""
        rows_M = t * self.size + jnp.tile(jnp.arange(self.size), group)
        sources_S = (s * self.size + jnp.arange(self.size))[:, None]
        return jnp.where(sources_S < self.length, _weights(rows_M, sources_S, self.causal, self.window), 0)

    def counts(self, t, group):
        """Σ_S w of the rows of tile t, [M]."""
        rows_M = t * self.size + jnp.tile(jnp.arange(self.size), group)
        if self.causal is not None:
            return rows_M + 1 + (1 - self.causal) * (self.length - 1 - rows_M)
        return rows_M + 1 if self.window is None else jnp.minimum(rows_M + 1, self.window)


def _scores(q_KME, k_KSE, w_SM, causal):
    """log(w exp(k·q)), [K, S, M]."""
    scores_KSM = jnp.einsum("KSE,KME->KSM", k_KSE, q_KME)
    if causal is not None:  # otherwise w is 0 or 1
        scores_KSM += jnp.log(jnp.where(w_SM > 0, w_SM, 1))
    return jnp.where(w_SM > 0, scores_KSM, MASKED)


def _forward(window, tile, q_QKGE, k_SKE, v_SKE, numbers):
    """The mixed values, and what the pullback needs."""
    length, _, group, width = q_QKGE.shape
    uniform = numbers["uniform"]
    tiles = _Tiles(length, window, tile, numbers["causal"])
    q_TKME = tiles.split(q_QKGE * width**-0.5)
    k_TKSE, v_TKSE = tiles.split(k_SKE[:, :, None]), tiles.split(v_SKE[:, :, None])

    def row_tile(t):
        q_KME = q_TKME[t]

        def mix(s, carry):
            largest_KM, sum_KM, mixed_KEM, mean_KEM = carry
            w_SM = tiles.weights(t, s, group).astype(q_KME.dtype)
            scores_KSM = _scores(q_KME, k_TKSE[s], w_SM, tiles.causal)
            new_KM = jnp.maximum(largest_KM, scores_KSM.max(1))
            weights_KSM = jnp.exp(scores_KSM - new_KM[:, None])
            shrink_KM = jnp.exp(largest_KM - new_KM)
            sum_KM = sum_KM * shrink_KM + weights_KSM.sum(1)
            mixed_KEM = mixed_KEM * shrink_KM[:, None] + jnp.einsum("KSE,KSM->KEM", v_TKSE[s], weights_KSM)
            if uniform is not None:
                mean_KEM += jnp.einsum("KSE,SM->KEM", v_TKSE[s], w_SM)
            return new_KM, sum_KM, mixed_KEM, mean_KEM

        zeros_KM, zeros_KEM = jnp.zeros_like(q_KME[:, :, 0]), jnp.zeros_like(q_KME.swapaxes(1, 2))
        start = zeros_KM + MASKED, zeros_KM, zeros_KEM, None if uniform is None else zeros_KEM
        largest_KM, sum_KM, mixed_KEM, mean_KEM = jax.lax.fori_loop(*tiles.sources_of(t), mix, start)
        mixed_KEM = softmax_KEM = mixed_KEM / sum_KM[:, None]
        if uniform is not None:
            mixed_KEM = uniform * mean_KEM / tiles.counts(t, group) + (1 - uniform) * softmax_KEM
        return mixed_KEM.swapaxes(1, 2), softmax_KEM.swapaxes(1, 2), largest_KM + jnp.log(sum_KM)

    mixed_TKME, softmax_TKME, log_sum_TKM = jax.lax.map(row_tile, jnp.arange(tiles.count))
    kept = checkpoint_name((q_TKME, k_TKSE, v_TKSE, softmax_TKME, log_sum_TKM), KEPT)
    return tiles.join(mixed_TKME, group), (*kept, numbers, length)


def _tile_pullback(weights_KSM, softmax_KSM, q_KME, k_KSE, v_KSE, ct_KME, expected_KM):
    """One tile's share of the pullbacks to queries, [K, E, M], keys and values, [K, S, E]; scores may be scaled after."""
    scores_ct_KSM = softmax_KSM * (jnp.einsum("KSE,KME->KSM", v_KSE, ct_KME) - expected_KM[:, None])
    q_ct_KEM = jnp.einsum("KSE,KSM->KEM", k_KSE, scores_ct_KSM)
    k_ct_KSE = jnp.einsum("KSM,KME->KSE", scores_ct_KSM, q_KME)
    return q_ct_KEM, k_ct_KSE, jnp.einsum("KSM,KME->KSE", weights_KSM, ct_KME)


# One cotangent after the other: its tile stays in a CPU's cache, and batched products would have it in two layouts.
_tile_pullback_in_turn = jax.custom_batching.sequential_vmap(_tile_pullback)


def _pullback(window, tile, kept, ct_QKGE):
    q_TKME, k_TKSE, v_TKSE, softmax_TKME, log_sum_TKM, numbers, length = kept
    _, _, group, width = ct_QKGE.shape
    uniform, score_path = numbers["uniform"], numbers["score_path"]
    tiles = _Tiles(length, window, tile, numbers["causal"])
    one_tile = _tile_pullback_in_turn if jax.default_backend() == "cpu" else _tile_pullback
    ct_TKME = tiles.split(ct_QKGE)
    through_scores = 1.0 if uniform is None else 1 - uniform
    if score_path is not None:
        through_scores = through_scores * score_path

    def row_tile(carry, t):
        q_KME, ct_KME = q_TKME[t], ct_TKME[t]
        expected_KM = jnp.sum(ct_KME * softmax_TKME[t], axis=-1)

        def pull(s, carry):
            q_ct_KEM, k_ct_TKSE, v_ct_TKSE = carry
            w_SM = tiles.weights(t, s, group).astype(q_KME.dtype)
            weights_KSM = softmax_KSM = jnp.exp(_scores(q_KME, k_TKSE[s], w_SM, tiles.causal) - log_sum_TKM[t][:, None])
            if uniform is not None:
                weights_KSM = uniform * w_SM / tiles.counts(t, group) + (1 - uniform) * softmax_KSM
            q_KEM, k_KSE, v_KSE = one_tile(weights_KSM, softmax_KSM, q_KME, k_TKSE[s], v_TKSE[s], ct_KME, expected_KM)
            return q_ct_KEM + q_KEM, k_ct_TKSE.at[s].add(k_KSE), v_ct_TKSE.at[s].add(v_KSE)

        start = jnp.zeros_like(q_KME.swapaxes(1, 2)), *carry
        q_ct_KEM, *carry = jax.lax.fori_loop(*tiles.sources_of(t), pull, start)
        return tuple(carry), q_ct_KEM.swapaxes(1, 2)

    start = jnp.zeros_like(k_TKSE), jnp.zeros_like(v_TKSE)
    (k_ct_TKSE, v_ct_TKSE), q_ct_TKME = jax.lax.scan(row_tile, start, jnp.arange(tiles.count))
    q_ct_QKGE = tiles.join(q_ct_TKME, group) * (width**-0.5 * through_scores)
    k_ct_SKE, v_ct_SKE = tiles.join(k_ct_TKSE, 1)[:, :, 0] * through_scores, tiles.join(v_ct_TKSE, 1)[:, :, 0]
    return q_ct_QKGE, k_ct_SKE, v_ct_SKE, jax.tree.map(jnp.zeros_like, numbers)


_tiled.defvjp(_tiled_vjp, _pullback, symbolic_zeros=True)
