"""What a forward pass alone says of influence: strengths measured from norms, and the attention rollout.

No gradient is taken, so it works on any model, trained ones included, and can be set against the Jacobian's norm.

Axes: N layer, L position, D stream width, K key/value heads, G query heads that share one, E head width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike

from lim.attention import attention_weights
from lim.influence import checked_index, checked_tokens
from lim.model import Decoder, attention_switches
from lim.switches import Switches


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Measured strengths and the profile that they make.

    Attributes:
      strengths_N: share of a hop in squares at the read-out, branch²·v²/(skip²·‖x‖² + branch²·v²), v² being ‖W_O W_V norm(x_j)‖²
        averaged over what the read-out attends to. At birth this is `lim.theory.kernel.effective_strengths`.
      rollout_L: row `read` of Π ((1-r_l) I + r_l A_l), A_l the attention averaged over heads and r_l(i) the share in
        norms, branch·v/(skip·‖x_i‖ + branch·v), at each row i; of sum 1.
      first_token_N: attention mass on the first token, averaged over heads and over the rows of the second half.
    """

    strengths_N: np.ndarray
    rollout_L: np.ndarray
    first_token_N: np.ndarray


def measure(decoder: Decoder, tokens_L: ArrayLike, switches: Switches = Switches(), *, read: int = -1) -> Rollout:
    """Strengths and attention rollout (Abnar and Zuidema 2020, arXiv:2005.00928, with measured in place of equal shares).

    Args:
      decoder: a `lim.Decoder`.
      tokens_L: token ids of one sequence, [L].
      switches: what to ablate.
      read: the position read out; negative counts from the end.

    Returns:
      A `Rollout`. Memory is the stream of every layer, [N, L, D], and one L×L matrix.

    Raises:
      ValueError: names the argument, its value and what is allowed.
    """
    tokens_L = checked_tokens(tokens_L, decoder.config)
    read = checked_index("read", read, len(tokens_L))
    structure, state = nnx.split(decoder)
    results = _measure(structure, nnx.as_pure(state), switches.check(decoder.config), tokens_L, read)
    return Rollout(*(np.asarray(result, np.float64) for result in results))


@functools.partial(jax.jit, static_argnames="structure")
@jax.default_matmul_precision("highest")
def _measure(structure, params, switches, tokens_L, read):
    decoder = nnx.merge(structure, params)
    layers = decoder.blocks, switches.per_layer(decoder.config.layers)
    length, x_LD = len(tokens_L), decoder.embed(tokens_L, switches)
    rows_L = jnp.arange(length)
    _, streams_NLD = jax.lax.scan(lambda x_LD, layer: (layer[0](x_LD, layer[1]), x_LD), x_LD, layers)

    def down(row_L, layer):
        block, own, x_LD = layer
        skip, branch = own.skip_and_branch()
        h_LD = block.attention_input(x_LD, own)
        value_L = jnp.sum(jnp.square(block.attention.values(h_LD)), axis=1)
        # 64 rows at a time: the L×L of several heads never stand side by side.
        q_LKGE, k_LKE, _ = block.attention.queries_keys_values(h_LD, own)
        attention_LL = jax.lax.map(
            lambda i: attention_weights(q_LKGE[i][None], k_LKE, i[None], **attention_switches(own))[:, :, 0].mean((0, 1)),
            rows_L, batch_size=min(64, length),
        )  # fmt: skip
        hop_L = branch**2 * attention_LL @ value_L
        stay_L = skip**2 * jnp.sum(jnp.square(x_LD), axis=1)
        share_L = jnp.sqrt(hop_L) / (jnp.sqrt(stay_L) + jnp.sqrt(hop_L))
        first = attention_LL[length // 2 :, 0].mean()
        return row_L * (1 - share_L) + (row_L * share_L) @ attention_LL, (hop_L / (stay_L + hop_L), first)

    start_L = jax.nn.one_hot(read, length, dtype=x_LD.dtype)
    row_L, (strengths_NL, first_N) = jax.lax.scan(down, start_L, (*layers, streams_NLD), reverse=True)
    return strengths_NL[:, read], row_L, first_N
