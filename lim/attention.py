"""Causal attention with grouped key/value heads and the three switches that act inside it.

Axes: Q query rows, S source positions, K key/value heads, G query heads that share one of them, E head width.
"""

import jax
import jax.numpy as jnp

# Finite, so that a masked score never makes inf - inf in a pullback; exp of it is exactly 0 beside any real score.
MASKED = -1e30


def admitted(rows_Q, length, causal=None, dtype=jnp.float32):
    """Weight w_QS of each source position before normalisation: 1 up to the row, 1 - causal beyond it.

    With `causal` None the weight beyond the row is 0. Rows of w divided by their sums are the averaging matrix M.
    """
    past_QS = rows_Q[:, None] >= jnp.arange(length)[None, :]
    future = 0.0 if causal is None else 1 - causal
    return jnp.where(past_QS, 1.0, future).astype(dtype)


def attention_weights(q_QKGE, k_SKE, rows_Q, *, causal=None, uniform=None, score_path=None):
    """What each query row attends to, [K, G, Q, S]; the arguments are those of `attend`."""
    w_QS = admitted(rows_Q, len(k_SKE), causal, q_QKGE.dtype)
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


def attend(q_QKGE, k_SKE, v_SKE, rows_Q, *, causal=None, uniform=None, score_path=None):
    """Softmax attention of some query rows over all source positions.

    Args:
      q_QKGE: queries of the rows `rows_Q` (their positions in the sequence).
      k_SKE, v_SKE: keys and values of every position.
      causal, uniform, score_path: traced numbers of `Switches` (`uniform_attention` for uniform), or None.

    Returns:
      The mixed values, [Q, K, G, E].
    """
    weights_KGQS = attention_weights(q_QKGE, k_SKE, rows_Q, causal=causal, uniform=uniform, score_path=score_path)
    return jnp.einsum("KGQS,SKE->QKGE", weights_KGQS, v_SKE)
