"""Switches: what an ablation turns, as a pytree of numbers.

A switch left at None is absent: the network runs as published and the compiler never sees it. A switch that is a
number is traced, so one compilation serves every value, and `jax.vmap` runs cells of a grid side by side.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from lim.config import Config

Number = jax.Array | np.ndarray | float  # of a switch: one, or one per layer
LARGEST = float(np.finfo(np.float32).max)
WHOLE = 2.0**24  # a window of so many positions is none: float32 counts no further


def _switch(low, high, default, doc, words=None, count=False):
    words = {"on": 1.0, "off": 0.0} if words is None else words
    return dataclasses.field(default=None, metadata=dict(low=low, high=high, default=default, doc=doc, words=words, count=count))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Switches:
    """One number per switch, or one per layer; None means as published.

    Attributes:
      rope: scales RoPE's angles; 0 rotates nothing.
      positions: scales the learned position embedding (gpt2); one number, since it enters once.
      causal: 1 masks the future, 0 sees it; between, a future position weighs 1 - causal before normalisation.
      residual: weight of the skip, with the branch at 1: x ← residual·x + f(x).
      alpha: convex mixing: x ← (1-alpha)·x + alpha·f(x). Excludes `residual`.
      mlp: blends the MLP sub-block in (1) and out (0: the stream passes it untouched, skip weight and all).
      norm: blends each norm with the identity, n·norm(x) + (1-n)·x; the final norm follows the last layer's value.
      uniform_attention: blends the attention weights (0) with the plain average over what the mask admits (1), as `alibi` weighs it.
      window: how many positions a row attends to, itself included, counted back (and ahead where `causal` is below 1).
      prefix: how many positions at the start every row attends to, whatever causal and window say: a prefix language model's, or
        with a window the sinks that it keeps.
      alibi: scales ALiBi's slopes: a position weighs exp(-alibi·slope·distance) before normalisation, slope by head
        (`lim.attention.slopes`); 0 leaves it out.
      score_path: scales gradients through the attention weights; 0 leaves the value pathway alone. Values do not change.

    A bad value is refused where the switches meet a network: `lim.influence`, a Decoder's call, `lim.theory.kernel.predict`
    raise the ValueError of `check`.

    Example:
      >>> switches = lim.Switches(rope=0.0, residual=[1.0, 1.0, 1.0, 0.5, 0.5, 0.5])  # of the last three layers halved
      >>> switches.check(lim.Config.preset("small")).residual.shape
      (6,)
      >>> lim.Switches(causal=2).check(lim.Config.preset("small"))
      Traceback (most recent call last):
      ValueError: causal=2: allowed are numbers from 0 to 1
    """

    rope: Number | None = _switch(0, math.inf, 1.0, "scale of RoPE's angles")
    positions: Number | None = _switch(0, math.inf, 1.0, "scale of the learned position embedding")
    causal: Number | None = _switch(0, 1, 1.0, "causal mask (on) or full attention (off)")
    residual: Number | None = _switch(0, math.inf, 1.0, "weight of the skip, branch at 1")
    alpha: Number | None = _switch(0, 1, None, "skip at 1-alpha, branch at alpha", words=dict(off=0.0))
    mlp: Number | None = _switch(0, 1, 1.0, "MLP sub-blocks")
    norm: Number | None = _switch(0, 1, 1.0, "norms")
    window: Number | None = _switch(1, WHOLE, WHOLE, "positions a row attends to", words=dict(off=WHOLE), count=True)
    prefix: Number | None = _switch(0, WHOLE, 0.0, "first positions that every row attends to", words=dict(off=0.0), count=True)
    alibi: Number | None = _switch(0, math.inf, 0.0, "scale of ALiBi's slopes")
    uniform_attention: Number | None = _switch(0, 1, 0.0, "exact averaging in place of softmax")
    score_path: Number | None = _switch(0, 1, 1.0, "gradients through the attention weights")

    def check(self, config: Config) -> "Switches":
        """These switches as float32 numbers, one or one per layer, after checking them against a Config.

        Raises:
          ValueError: names the switch, its value and what is allowed.
        """
        checked = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, (str, bool)):
                raise ValueError(f"{field.name}={value!r}: must be a number (Switches.parse reads words)")
            allowed = _allowed(field, "numbers")
            if isinstance(value, jax.core.Tracer):
                number, shape = value, jnp.shape(value)
            else:
                try:
                    number = np.asarray(value, np.float64)
                except (TypeError, ValueError):
                    raise ValueError(f"{field.name}={value!r}: must be a number, or one per layer") from None
                shape, (low, high) = number.shape, (field.metadata["low"], field.metadata["high"])
                whole = not field.metadata["count"] or np.all(np.floor(number) == number)
                if not (np.all((low <= number) & (number <= min(high, LARGEST))) and whole):
                    raise ValueError(f"{field.name}={value}: allowed are {allowed}")
            if shape not in ((), (config.layers,)) or (shape and field.name == "positions"):
                per_layer = "" if field.name == "positions" else f", or one for each of the {config.layers} layers"
                raise ValueError(f"{field.name} has shape {shape}: give one number{per_layer}")
            checked[field.name] = jnp.asarray(number, jnp.float32)
        if self.residual is not None and self.alpha is not None:
            raise ValueError("residual and alpha both set the weight of the skip: give one of them")
        for name, absent in (("rope", not config.has_rope), ("positions", config.has_rope)):
            value = getattr(self, name)
            if absent and value is not None and (isinstance(value, jax.core.Tracer) or np.any(np.asarray(value) != 0)):
                other = "--positions" if name == "rope" else "--rope"
                raise ValueError(f"{name}={value}: {config.family} has none, so only off (0) is allowed; see {other}")
            if absent:
                checked.pop(name, None)
        return Switches(**checked)

    def per_layer(self, layers: int) -> "Switches":
        """The same switches, each broadcast to one number per layer, as a scan over layers takes them."""
        return jax.tree.map(lambda v: jnp.broadcast_to(v, (layers,)), self)

    def skip_and_branch(self) -> tuple[Number, Number]:
        """The weights of skip and branch, from `alpha` or `residual`; 1 where they are absent."""
        if self.alpha is not None:
            return 1 - self.alpha, self.alpha
        return 1.0 if self.residual is None else self.residual, 1.0

    @classmethod
    def parse(cls, name: str, text: str) -> float:
        """Reads one switch value as a command line gives it: on, off or a number.

        Raises:
          ValueError: names the switch, the text and what is allowed.
        """
        field = {f.name: f for f in dataclasses.fields(cls)}[name]
        words = field.metadata["words"]
        allowed = f"{', '.join(words)} or a {_allowed(field, 'number')}"
        try:
            value = words[text] if text in words else float(text)
        except ValueError:
            raise ValueError(f"{name}={text!r}: allowed are {allowed}") from None
        whole = not field.metadata["count"] or value % 1 == 0
        if not (field.metadata["low"] <= value <= min(field.metadata["high"], LARGEST) and whole):
            raise ValueError(f"{name}={text!r}: allowed are {allowed}")
        return value


def _allowed(field, noun) -> str:
    low, high = field.metadata["low"], field.metadata["high"]
    noun = f"whole {noun}" if field.metadata["count"] else noun
    if high in (math.inf, WHOLE):
        return f"{noun} of at least {low}" + (f", at most {LARGEST:.2g}" if high == math.inf else "")
    return f"{noun} from {low} to {high}"
