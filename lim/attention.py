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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from lim.switches import Number

Array = jax.Array | np.ndarray
# Finite, so that a masked score never makes inf - inf in a pullback; exp of it is exactly 0 beside any real score.
MASKED = -1e30
# The name of what a pullback needs and had better not compute again; see `Decoder.stream`.
KEPT = "kept"
TILE = 256  # rows and sources: large enough for fast products, small enough that a tile stays in the cache


def slopes(heads: int) -> np.ndarray:
    """ALiBi's slopes, one per query head: 2^(-8n/heads), n = 1…heads, for a power of two (Press et al., 2022, arXiv:2108.12409).

    Other numbers of heads take those of the next smaller power of two, then every other one of the next larger.
    """
    power = 2 ** int(math.log2(heads))
    first = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * power, 2) / power)
    return np.concatenate([first, between[: heads - power]])


def log_admitted(rows: jax.Array, sources: jax.Array, slope: Array | None = None, *, causal: Number | None = None,
                 window: Number | None = None, prefix: Number | None = None, alibi: Number | None = None) -> jax.Array:  # fmt: skip
    """ln w of the weight of each source before normalisation, and softmax's scores: `MASKED` where w is 0.

    w is 1 from the row back, 1 - causal beyond it (0 for None), 0 at a distance of `window` or more, and 1 at the first `prefix`
    positions in any case. All of it falls with distance by exp(-alibi·slope·|row - source|). Rows of w divided by their sums are
    the averaging matrix M.

    Args:
      rows, sources: positions, of shapes that broadcast.
      slope: of each head, likewise; for `alibi`.
      causal, window, prefix, alibi: numbers of `Switches`, or None.
    """
    ahead = MASKED
    if causal is not None:  # both branches finite, so that the derivative by `causal` is too
        ahead = jnp.where(causal < 1, jnp.log(jnp.where(causal < 1, 1 - causal, 1)), MASKED)
    log_w = jnp.where(rows >= sources, 0.0, ahead)
    if window is not None:
        log_w = jnp.where(abs(rows - sources) < window, log_w, MASKED)
    if prefix is not None:
        log_w = jnp.where(sources < prefix, 0.0, log_w)
    if alibi is not None:
        log_w = log_w - alibi * slope * abs(rows - sources)  # type: ignore[operator]  # with alibi a slope is given
    return log_w  # type: ignore[return-value]  # numpy's types take the product for its own


def attention_weights(q_QKGE: jax.Array, k_SKE: jax.Array, rows_Q: jax.Array, *, uniform: Number | None = None,
                      score_path: Number | None = None, **mask: Number | None) -> jax.Array:  # fmt: skip
    """What each query row attends to, [K, G, Q, S]; the arguments are those of `attend`."""
    _, kv_heads, group, width = q_QKGE.shape
    slope_KG = slopes(kv_heads * group).reshape(kv_heads, group, 1, 1)
    log_w_KGQS = log_admitted(rows_Q[:, None], jnp.arange(len(k_SKE)), slope_KG, **mask).astype(q_QKGE.dtype)
    scores_KGQS = jnp.einsum("QKGE,SKE->KGQS", q_QKGE, k_SKE) * width**-0.5
    if score_path is not None:
        still = jax.lax.stop_gradient(scores_KGQS)
        scores_KGQS = still + score_path * (scores_KGQS - still)
    weights_KGQS = jax.nn.softmax(scores_KGQS + log_w_KGQS, axis=-1)
    if uniform is not None:
        weights_KGQS = uniform * jax.nn.softmax(log_w_KGQS, axis=-1) + (1 - uniform) * weights_KGQS
    return weights_KGQS  # type: ignore[return-value]  # as above


def attend(q_QKGE: jax.Array, k_SKE: jax.Array, v_SKE: jax.Array, rows_Q: jax.Array | None = None, *, uniform: Number | None = None,
           score_path: Number | None = None, tile: int = TILE, **mask: Number | None) -> jax.Array:  # fmt: skip
    """Softmax attention of some query rows over all source positions.

    Args:
      q_QKGE: queries of the rows `rows_Q` (their positions in the sequence).
      k_SKE, v_SKE: keys and values of every position.
      rows_Q: positions of the query rows, whose weights are then held whole; None for every position in order, which
        goes tile by tile.
      uniform, score_path: traced numbers of `Switches` (`uniform_attention` for uniform), or None. Tile by tile neither they nor
        those of the mask have a derivative: asking for one is refused.
      tile: rows and sources per tile.
      **mask: `causal`, `window`, `prefix` and `alibi` of `Switches`, numbers or None, as `log_admitted` takes them.

    Returns:
      The mixed values, [Q, K, G, E].

    Raises:
      ValueError: a derivative by one of the numbers tile by tile.
    """
    if rows_Q is not None:
        weights_KGQS = attention_weights(q_QKGE, k_SKE, rows_Q, uniform=uniform, score_path=score_path, **mask)
        return jnp.einsum("KGQS,SKE->QKGE", weights_KGQS, v_SKE)
    numbers = dict(uniform=uniform, score_path=score_path, mask=mask)
    return _tiled(tile, q_QKGE, k_SKE, v_SKE, jax.tree.map(lambda number: jnp.asarray(number, q_QKGE.dtype), numbers))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(tile, q_QKGE, k_SKE, v_SKE, numbers):
    return _forward(tile, q_QKGE, k_SKE, v_SKE, numbers)[0]


def _tiled_vjp(tile, q_QKGE, k_SKE, v_SKE, numbers):
    named = dict(numbers["mask"], uniform=numbers["uniform"], score_path=numbers["score_path"])
    if names := [name for name, number in named.items() if number is not None and number.perturbed]:
        raise ValueError(f"{', '.join(names)}: no derivative tile by tile; give rows_Q=jnp.arange(L) for the plain form, which has one")
    return _forward(tile, *jax.tree.map(lambda p: p.value, (q_QKGE, k_SKE, v_SKE, numbers)))


class _Tiles:
    """How a sequence falls into equal tiles, and which weights each holds. Padding comes last."""

    def __init__(self, length, tile, mask):
        self.length, self.mask = length, mask
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

    def sources_of(self, t) -> tuple[Any, Any]:
        """First and last-plus-one tile of sources that tile t of rows attends to."""
        causal, window, prefix = (self.mask.get(name) for name in ("causal", "window", "prefix"))
        if causal is not None:
            return 0, self.count
        first, stop = 0, t + 1
        if window is not None:
            first = (jnp.maximum(t * self.size - window + 1, 0) // self.size).astype(int)
        if prefix is not None:
            first = jnp.where(prefix > 0, 0, first)
            stop = jnp.clip(jnp.ceil(prefix / self.size).astype(int), stop, self.count)
        return first, stop

    def log_weights(self, t, s, kv_heads, group):
        """ln w of the rows of tile t and the sources of tile s, [K, S, M], or [S, M] where heads share it."""
        rows_M = t * self.size + jnp.tile(jnp.arange(self.size), group)
        sources_S = (s * self.size + jnp.arange(self.size))[:, None]
        slope_KSM = jnp.repeat(slopes(kv_heads * group).reshape(kv_heads, 1, group), self.size, axis=-1)
        return jnp.where(sources_S < self.length, log_admitted(rows_M, sources_S, slope_KSM, **self.mask), MASKED)


def _forward(tile, q_QKGE, k_SKE, v_SKE, numbers):
    """The mixed values, and what the pullback needs."""
    length, kv_heads, group, width = q_QKGE.shape
    uniform = numbers["uniform"]
    tiles = _Tiles(length, tile, numbers["mask"])
    q_TKME = tiles.split(q_QKGE * width**-0.5)
    k_TKSE, v_TKSE = tiles.split(k_SKE[:, :, None]), tiles.split(v_SKE[:, :, None])

    def row_tile(t):
        q_KME = q_TKME[t]

        def mix(s, carry):
            largest_KM, sum_KM, mixed_KEM, count_KM, mean_KEM = carry
            log_w_KSM = tiles.log_weights(t, s, kv_heads, group).astype(q_KME.dtype)
            scores_KSM = jnp.einsum("KSE,KME->KSM", k_TKSE[s], q_KME) + log_w_KSM
            new_KM = jnp.maximum(largest_KM, scores_KSM.max(1))
            weights_KSM = jnp.exp(scores_KSM - new_KM[:, None])
            shrink_KM = jnp.exp(largest_KM - new_KM)
            sum_KM = sum_KM * shrink_KM + weights_KSM.sum(1)
            mixed_KEM = mixed_KEM * shrink_KM[:, None] + jnp.einsum("KSE,KSM->KEM", v_TKSE[s], weights_KSM)
            if uniform is not None:
                w_KSM = jnp.broadcast_to(jnp.exp(log_w_KSM), scores_KSM.shape)
                count_KM += w_KSM.sum(1)
                mean_KEM += jnp.einsum("KSE,KSM->KEM", v_TKSE[s], w_KSM)
            return new_KM, sum_KM, mixed_KEM, count_KM, mean_KEM

        zeros_KM, zeros_KEM = jnp.zeros_like(q_KME[:, :, 0]), jnp.zeros_like(q_KME.swapaxes(1, 2))
        start = zeros_KM + MASKED, zeros_KM, zeros_KEM, *((None, None) if uniform is None else (zeros_KM, zeros_KEM))
        largest_KM, sum_KM, mixed_KEM, count_KM, mean_KEM = jax.lax.fori_loop(*tiles.sources_of(t), mix, start)
        mixed_KEM = softmax_KEM = mixed_KEM / sum_KM[:, None]
        if uniform is not None:
            count_KM = jnp.where(count_KM > 0, count_KM, 1)  # a row of the padding may see nothing but padding
            mixed_KEM = uniform * mean_KEM / count_KM[:, None] + (1 - uniform) * softmax_KEM
        return mixed_KEM.swapaxes(1, 2), softmax_KEM.swapaxes(1, 2), largest_KM + jnp.log(sum_KM), count_KM

    mixed_TKME, softmax_TKME, log_sum_TKM, count_TKM = jax.lax.map(row_tile, jnp.arange(tiles.count))
    kept = checkpoint_name((q_TKME, k_TKSE, v_TKSE, softmax_TKME, log_sum_TKM, count_TKM), KEPT)
    return tiles.join(mixed_TKME, group), (*kept, numbers, length)


def _tile_pullback(weights_KSM, softmax_KSM, q_KME, k_KSE, v_KSE, ct_KME, expected_KM):
    """One tile's share of the pullbacks to queries, [K, E, M], keys and values, [K, S, E]; scores may be scaled after."""
    scores_ct_KSM = softmax_KSM * (jnp.einsum("KSE,KME->KSM", v_KSE, ct_KME) - expected_KM[:, None])
    q_ct_KEM = jnp.einsum("KSE,KSM->KEM", k_KSE, scores_ct_KSM)
    k_ct_KSE = jnp.einsum("KSM,KME->KSE", scores_ct_KSM, q_KME)
    return q_ct_KEM, k_ct_KSE, jnp.einsum("KSM,KME->KSE", weights_KSM, ct_KME)


# One cotangent after the other: its tile stays in a CPU's cache, and batched products would have it in two layouts.
_tile_pullback_in_turn = jax.custom_batching.sequential_vmap(_tile_pullback)


def _pullback(tile, kept, ct_QKGE):
    q_TKME, k_TKSE, v_TKSE, softmax_TKME, log_sum_TKM, count_TKM, numbers, length = kept
    _, kv_heads, group, width = ct_QKGE.shape
    uniform, score_path = numbers["uniform"], numbers["score_path"]
    tiles = _Tiles(length, tile, numbers["mask"])
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
            log_w_KSM = tiles.log_weights(t, s, kv_heads, group).astype(q_KME.dtype)
            scores_KSM = jnp.einsum("KSE,KME->KSM", k_TKSE[s], q_KME) + log_w_KSM
            weights_KSM = softmax_KSM = jnp.exp(scores_KSM - log_sum_TKM[t][:, None])
            if uniform is not None:
                weights_KSM = uniform * jnp.exp(log_w_KSM) / count_TKM[t][:, None] + (1 - uniform) * softmax_KSM
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
