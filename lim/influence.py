"""Influence: the Frobenius norm of the Jacobian from one position's input to the read-out, ‖∂ output / ∂ x_j‖_F.

The network is linearised once, and cotangents are pulled back in chunks whose squares are summed as they come, so
memory is O(chunk·L·D) and neither the D×L×D Jacobian nor one of its D×L slices is ever stored.

Axes: L position, D stream width, C cotangents of one chunk, Y entries of the output.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx
from numpy.typing import ArrayLike

from lim.attention import Array
from lim.config import Config
from lim.model import Decoder, checked_tokens, random_key
from lim.switches import Switches

OUTPUTS = ("hidden", "stream", "logits", "loss", "top_probability")
SCALARS = ("loss", "top_probability")
# Cotangents are pulled back this many times enlarged, which is exact, so that float32 loses nothing above 1e-52: without
# residuals a profile of 24 layers spans 37 decades. Where it overflows instead, they are pulled back as they are.
LARGE = 2.0**64


@dataclasses.dataclass(frozen=True)
class Influence:
    """A measured profile.

    Attributes:
      influence_L: ‖∂ output / ∂ x_j‖_F, where x_j is the stream that enters block `source` at position j. In units of
        the output per unit of the stream, float64. A float32 network loses what is below 1e-52.
      stderr_L: its standard error from the choice of probes; 0 when every row was pulled back.
      cotangents: how many were pulled back; `exact` says whether that was all of them.
      chunk: how many were pulled back side by side.

    Example:
      >>> decoder = lim.Decoder.at_birth(lim.Config.preset("small"), seed=0)
      >>> measured = lim.influence(decoder, lim.random_tokens(decoder.config.vocab, length=128, seed=0), probes=16)
      >>> measured.influence_L.shape, measured.exact, measured.cotangents
      ((128,), False, 16)
      >>> print(f"{measured.influence_L[0]:.0f} ± {measured.stderr_L[0]:.0f}")
      276 ± 11
    """

    influence_L: np.ndarray
    stderr_L: np.ndarray
    cotangents: int
    exact: bool
    chunk: int


def influence(decoder: Decoder, tokens_L: ArrayLike, switches: Switches = Switches(), *, output: str = "hidden", source: int = 0,
              read: int = -1, target: int | None = None, probes: int | None = None, seed: int = 0, chunk: int | None = None,
              precision: str = "highest") -> Influence:  # fmt: skip
    """Per-position influence of one sequence on the output at one position.

    Args:
      decoder: a `lim.Decoder`.
      tokens_L: token ids of one sequence, [L].
      switches: what to ablate.
      output: "hidden" (after the final norm), "stream" (before it), "logits", or one number: "loss" (the negative log
        probability of the next token) or "top_probability" (the probability of the likeliest next token).
      source: the block whose input is perturbed; 0 is the embedding (token and learned position together).
      read: the position read out; negative counts from the end.
      target: for "loss", the token to predict; by default the one that follows `read` in `tokens_L`.
      probes: None pulls back every entry of the output (exact); a number pulls back that many random orthonormal
        directions, scaled so that influence² is unbiased. With as many probes as entries it is exact again.
      seed: chooses the probes; an integer from 0 to 2³² - 1.
      chunk: cotangents pulled back side by side; by default as many as memory and cache like.
      precision: of matrix products on accelerators, as `jax.default_matmul_precision`. CPUs always use float32.

    Returns:
      An `Influence`. Its standard error follows from the sample variance of K probes among Y entries,
      var(influence²) = S²/K·(1 - K/Y), halved and divided by the influence for the square root (delta method). Squares
      are skewed: a 95 % Student interval from 4 probes covers some 89 %.

    Raises:
      ValueError: names the argument, its value and what is allowed.

    Example:
      >>> decoder = lim.Decoder.at_birth(lim.Config.preset("small"), seed=0)
      >>> tokens_L = lim.random_tokens(decoder.config.vocab, length=128, seed=0)
      >>> measured = lim.influence(decoder, tokens_L, probes=16)
      >>> print(measured.influence_L[[0, 64, 126, 127]].round(1))  # first, middle, last but one, last
      [275.9  12.5   6.5 191.5]
    """
    config = decoder.config
    tokens_L = checked_tokens(tokens_L, config)
    length = len(tokens_L)
    switches = switches.check(config)
    if output not in OUTPUTS:
        raise ValueError(f"output={output!r}: allowed are {', '.join(OUTPUTS)}")
    source = checked_index("source", source, config.layers)
    read = checked_index("read", read, length)
    if output == "loss" and target is None:
        if read == length - 1:
            raise ValueError("target=None: the loss at the last position needs the token that follows it")
        target = int(tokens_L[read + 1])
    target = 0 if target is None else target
    if isinstance(target, bool) or not isinstance(target, (int, np.integer)) or not 0 <= target < config.vocab:
        raise ValueError(f"target={target!r}: allowed are 0 to {config.vocab - 1}, the token ids")
    rows = entries(config, output)
    if probes is not None and not (isinstance(probes, (int, np.integer)) and 2 <= probes <= rows):
        if rows > 1:
            raise ValueError(f"probes={probes}: allowed are 2 to {rows}, the entries of {output}, or None for all")
        probes = None  # one number has one cotangent
    cotangents = rows if probes is None else int(probes)
    chunk = default_chunk(config, length, cotangents) if chunk is None else chunk
    if not isinstance(chunk, (int, np.integer)) or chunk < 1:
        raise ValueError(f"chunk={chunk!r}: must be a positive integer")
    chunk = min(int(chunk), cotangents)

    structure, state = nnx.split(decoder)
    for unit in (LARGE, 1.0):
        with jax.default_matmul_precision(precision):
            moments = squared_influence(structure, nnx.as_pure(state), switches, tokens_L, read, target,
                                        random_key(seed), unit, output=output, source=source, rows=rows,
                                        probes=probes, chunk=chunk)  # fmt: skip
        scale_L, mean_L, m2_L = (np.asarray(moment, np.float64) for moment in moments)
        if np.all(np.isfinite([scale_L, mean_L, m2_L])):
            break
    return finish(scale_L / unit, mean_L, m2_L, rows, cotangents, chunk)


@functools.partial(jax.jit, static_argnames=("structure", "output", "source", "rows", "probes", "chunk"))
def squared_influence(structure: nnx.GraphDef, params: nnx.State, switches: Switches, tokens_L: Array, read: Array | int,
                      target: Array | int, key: jax.Array, unit: Array | float = 1.0, *, output: str, source: int, rows: int,
                      probes: int | None, chunk: int) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The pure function under `influence`: running moments of the squared pullbacks.

    Args:
      structure, params: `nnx.split` of the decoder, the parameters as a pure tree.
      read, target: non-negative integers, traced.
      unit: what the cotangents are multiplied by; scale_L carries it. The other arguments are those of `influence`, checked; `rows` is
        the number of entries of the output.

    Returns:
      scale_L, mean_L, m2_L: over the cotangents, the mean of ‖pullback_j/scale_j‖² (times rows·scale² an unbiased
      estimate of influence²) and the sum of squared deviations from it.
    """
    decoder = nnx.merge(structure, params)
    x_LD = decoder.stream(decoder.embed(tokens_L, switches), switches, 0, source)

    def readout(x_LD):
        stream_D = decoder.read(x_LD, switches, read, source)
        if output == "stream":
            return stream_D
        hidden_D = decoder.hidden(stream_D, switches)
        if output == "hidden":
            return hidden_D
        logits_V = decoder.logits(hidden_D)
        if output == "logits":
            return logits_V
        if output == "loss":
            return -jax.nn.log_softmax(logits_V)[target][None]
        return jax.nn.softmax(logits_V).max()[None]

    y_Y, pullback = jax.vjp(readout, x_LD)
    cotangents = rows if probes is None else probes
    if probes is not None:
        # Haar-distributed: QR of a Gaussian matrix, with R's diagonal made positive.
        q_YK, r_KK = jnp.linalg.qr(jax.random.normal(key, (rows, probes), y_Y.dtype))
        frame_KY = (q_YK * jnp.sign(jnp.diagonal(r_KK))).T

    def squares(carry, start):
        index_C = start + jnp.arange(chunk)
        if probes is None:
            ct_CY = jax.nn.one_hot(index_C, rows, dtype=y_Y.dtype)
        else:
            ct_CY = frame_KY[jnp.minimum(index_C, cotangents - 1)]
        (pulled_CLD,) = jax.vmap(pullback)(ct_CY * jnp.asarray(unit, ct_CY.dtype))
        return _merge(carry, pulled_CLD, (index_C < cotangents).astype(y_Y.dtype)), None

    zeros_L = jnp.zeros(x_LD.shape[0], y_Y.dtype)
    starts = jnp.arange(0, cotangents, chunk)
    (_, scale_L, mean_L, m2_L), _ = jax.lax.scan(squares, (jnp.zeros((), y_Y.dtype), zeros_L, zeros_L, zeros_L), starts)
    return scale_L, mean_L, m2_L


def _merge(carry, pulled_CLD, counted_C):
    """Chan's update of count, mean and sum of squared deviations of ‖pulled/scale‖² by one chunk.

    `scale_L` is the largest entry that position has seen, so that squares do not underflow: without residuals a profile
    spans 30 decades, whose squares float32 does not hold. Uncounted rows are padding.
    """
    n, old_scale_L, mean_L, m2_L = carry
    scale_L = jnp.maximum(old_scale_L, jnp.max(jnp.abs(pulled_CLD), axis=(0, 2)))
    divisor_L = jnp.where(scale_L > 0, scale_L, 1)
    shrink_L = jnp.square(old_scale_L / divisor_L)
    mean_L, m2_L = mean_L * shrink_L, m2_L * jnp.square(shrink_L)
    square_CL = jnp.sum(jnp.square(pulled_CLD / divisor_L[:, None]), axis=-1)
    m = counted_C.sum()
    chunk_mean_L = jnp.einsum("C,CL->L", counted_C, square_CL) / m
    chunk_m2_L = jnp.einsum("C,CL->L", counted_C, jnp.square(square_CL - chunk_mean_L))
    delta_L = chunk_mean_L - mean_L
    return n + m, scale_L, mean_L + delta_L * m / (n + m), m2_L + chunk_m2_L + jnp.square(delta_L) * n * m / (n + m)


def entries(config: Config, output: str) -> int:
    """How many entries an output has."""
    return 1 if output in SCALARS else config.vocab if output == "logits" else config.width


def finish(scale_L: np.ndarray, mean_L: np.ndarray, m2_L: np.ndarray, rows: int, cotangents: int, chunk: int) -> Influence:
    """The Influence that the moments of `squared_influence` (its scale in units of the cotangents) come to."""
    root_L = np.sqrt(mean_L)
    variance_L = m2_L / max(cotangents - 1, 1) / cotangents * (1 - cotangents / rows)
    error_L = np.divide(np.sqrt(variance_L), 2 * root_L, out=np.zeros_like(root_L), where=root_L > 0)
    unit_L = scale_L * math.sqrt(rows)
    return Influence(unit_L * root_L, unit_L * error_L, cotangents, cotangents == rows, chunk)


def default_chunk(config: Config, length: int, cotangents: int) -> int:
    """Cotangents to pull back side by side: enough to fill the matrix units and to share what they have in common.

    On a CPU few enough that the MLP's activations stay near the cache (about 20 MB), though 4 where memory allows:
    attention's probabilities are found again for each chunk.
    """
    per_cotangent = 4 * length * (6 * config.width + 4 * config.inner)
    fits = max(1, int(0.3 * available_memory()) // per_cotangent)
    rows = min(8192, 5_000_000 // config.inner) if jax.default_backend() == "cpu" else 32768
    most = min(fits, max(4, rows // length), cotangents)
    # The last chunk is padded to the size of the others: of the sizes near `most`, the one that pads least, 4 and 4 of 8, not 6 and 6.
    return min(range(most, most // 2, -1), key=lambda chunk: -cotangents % chunk)


def available_memory() -> int:
    """Bytes free on the first device: as the device says, or of the machine's memory on CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available


def checked_index(name: str, value: int, size: int) -> int:
    """An index as a non-negative integer, or a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -size <= value < size:
        raise ValueError(f"{name}={value!r}: allowed are 0 to {size - 1}, or negative counting from the end")
    return int(value) % size
