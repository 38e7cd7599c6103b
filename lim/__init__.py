"""lim: position bias of decoder-only transformers, measured as a Jacobian and predicted from the network's birth.

    >>> import lim
    >>> config = lim.Config.preset("small")
    >>> decoder = lim.Decoder.at_birth(config, seed=0)
    >>> measured = lim.influence(decoder, lim.random_tokens(config.vocab, 128, seed=0), probes=16)
    >>> lim.summarize(measured.influence_L).shape
    'U'
    >>> predicted = lim.theory.kernel.predict(config, 128)
    >>> round(lim.compare(measured.influence_L, predicted.finite_width_L)["spearman"], 2)
    0.99

Axes of arrays stand in their names: influence_L has one number per position. The examples of all docstrings take
`import lim` as done.
"""

import jaxlib

if jaxlib.__version__ == "0.10.2":
    raise ImportError(
        "jaxlib 0.10.2 silently returns wrong numbers on CPU for vmapped products followed by a reduction, which is "
        "what lim computes (jax-ml/jax issue 39103). Cure: pip install 'jax>=0.10.1,!=0.10.2'"
    )

from lim import theory  # noqa: E402
from lim.canary import check_compiler  # noqa: E402
from lim.config import Config  # noqa: E402
from lim.influence import Influence, influence  # noqa: E402
from lim.model import Decoder  # noqa: E402
from lim.profile import compare, jackknife, rms, summarize  # noqa: E402
from lim.store import open  # noqa: E402, A004
from lim.switches import Switches  # noqa: E402
from lim.tokens import random_tokens  # noqa: E402

__all__ = [
    "Config", "Decoder", "Influence", "Switches", "check_compiler", "compare", "influence", "jackknife", "open",
    "random_tokens", "rms", "summarize", "theory",
]  # fmt: skip
