"""A canary for the compiler: jaxlib 0.10.2 on CPU returned wrong numbers for the very pattern this library lives on.

The pattern is a product vmapped over tens of thousands of rows and then reduced (jax-ml/jax issue 39103); in 0.10.2 the
rows of the last, incomplete tile came out wrong, silently. Other versions may break at other sizes, so the check runs
the pattern at the run's own size, too.
"""

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

# The smallest size at which float32 failed in jaxlib 0.10.2: one row past 2¹⁵ tiles, three columns.
KNOWN_BAD = (32769, 3)


class CompilerError(RuntimeError):
    """The compiler returned wrong numbers."""


def check_compiler(rows: int, width: int) -> None:
    """Runs the pattern at `rows` × `width` and at the known bad size, against the same sums in float64 numpy.

    Args:
      rows: rows that one step of the run reduces, chunk·L.
      width: width of a row, D.

    Raises:
      CompilerError: says how far off it was, and what to install instead.

    Example:
      >>> lim.check_compiler(rows=16 * 128, width=128)  # 16 cotangents of 128 positions; silent where all is well
    """
    for rows, width in {KNOWN_BAD, (rows, width)}:
        rng = np.random.default_rng(0)
        x_RD, w_3D = rng.normal(size=(rows, width)).astype(np.float32), rng.normal(size=(3, width)).astype(np.float32)
        with jax.default_matmul_precision("highest"):
            batched_R = np.asarray(_sums(w_3D, x_RD), np.float64)
        products_R3 = x_RD.astype(np.float64) @ w_3D.T.astype(np.float64)
        unbatched_R = np.sum(np.square(products_R3), axis=1)
        # A square carries twice the rounding of its dot product, whose terms may cancel: scale by the norms.
        scale_R = np.sum(np.square(x_RD, dtype=np.float64), axis=1) * np.sum(np.square(w_3D, dtype=np.float64))
        off = float(np.max(np.abs(batched_R - unbatched_R) / scale_R))
        if not off < 1e-4:
            raise CompilerError(
                f"jaxlib {jaxlib.__version__} returns wrong numbers here: a vmapped product and reduction over {rows} "
                f"rows is off by {off:.1e} (jax-ml/jax issue 39103). Install another: pip install 'jax>=0.10.1,!=0.10.2'"
            )


@jax.jit
def _sums(w_3D, x_RD):
    return jax.vmap(lambda x_D: jnp.sum(jnp.square(w_3D @ x_D)))(x_RD)
