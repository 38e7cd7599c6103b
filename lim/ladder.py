"""The ladder from the averaging operator to the real network: each rung adds one thing, and has its prediction.

A prediction that holds on every rung is right for its reasons; where one fails, the rung says which part is to blame.
All rungs share one shape, and an initial spread for which width·init_std² is that of a network of width 896 at 0.02, so
that branches weigh against the skip as they do in Qwen2-0.5B whatever the width.
"""

import dataclasses

import numpy as np

from lim.config import Config
from lim.influence import influence
from lim.model import Decoder, with_identity_values
from lim.switches import Switches
from lim.theory import cesaro, kernel
from lim.tokens import random_tokens

# numbers on every rung, so that the compiler sees one network
_PUBLISHED = dict(rope=1.0, norm=1.0, mlp=1.0, uniform_attention=0.0)
_BARE = dict(rope=0.0, norm=0.0, mlp=0.0, uniform_attention=1.0)


@dataclasses.dataclass(frozen=True)
class Rung:
    """One rung.

    Attributes:
      name: what this rung adds to the one below.
      config, switches: the network.
      identity: whether attention passes values unchanged (`lim.model.with_identity_values`).
    """

    name: str
    config: Config
    switches: Switches
    identity: bool = False

    def predict(self, length: int) -> tuple[np.ndarray, float]:
        """(influence_L, cv): the root mean square over seeds with its finite-width bias, and the scatter of ‖J‖².

        The first rung is the operator, √D·Π (I + M), and does not scatter; the others are `lim.theory.kernel`.
        """
        if self.identity:
            row_L = cesaro.operator_row(length, 1.0, 1.0, layers=self.config.layers)
            return np.sqrt(self.config.width) * row_L, 0.0
        theory = kernel.predict(self.config, length, self.switches, rope=bool(np.any(self.switches.rope)))
        return theory.finite_width_L, theory.cv

    def measure(self, length: int, seed: int, probes: int | None = None) -> np.ndarray:
        """The measured profile of one seed, [L]."""
        decoder = Decoder.at_birth(self.config, seed)
        if self.identity:
            decoder = with_identity_values(decoder)
        tokens_L = random_tokens(self.config.vocab, length, seed)
        return influence(decoder, tokens_L, self.switches, probes=probes, seed=seed).influence_L.astype(np.float64)


def shape(width: int, layers: int, length: int) -> Config:
    """The ladder's Config: Qwen2 with heads of 32, half as many key/value heads, and an MLP four times as wide.

    Raises:
      ValueError: the width is not a multiple of 64.
    """
    if width < 64 or width % 64:
        raise ValueError(f"width={width}: must be a multiple of 64")
    return Config("qwen2", layers=layers, width=width, heads=width // 32, kv_heads=width // 64, head_dim=32, inner=4 * width,
                  vocab=length, max_length=length, init_std=0.02 * (896 / width) ** 0.5)  # fmt: skip


def rungs(width: int = 128, layers: int = 6, length: int = 64) -> list[Rung]:
    """The six rungs, lowest first.

    Raises:
      ValueError: a size does not fit.
    """
    config = shape(width, layers, length)
    whole = dataclasses.replace(config, kv_heads=config.heads)
    return [
        Rung("identity values, uniform attention", whole, Switches(**_BARE), identity=True),
        Rung("random values", config, Switches(**_BARE)),
        Rung("norms", config, Switches(**_BARE | dict(norm=1.0))),
        Rung("MLPs", config, Switches(**_BARE | dict(norm=1.0, mlp=1.0))),
        Rung("softmax of random queries and keys", config, Switches(**_PUBLISHED | dict(rope=0.0))),
        Rung("RoPE: the network as published", config, Switches(**_PUBLISHED)),
    ]
