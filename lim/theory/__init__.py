"""The mathematics, independent of the network that is measured: numbers and a Config in, profiles out.

* `cesaro`: the averaging operator at finite length, the paper's walk, and random values' second moments.
* `density`: its continuum limit, for a strength per layer.
* `kernel`: the real architectures at birth in absolute units, no free parameter; `effective_strengths`.
* `paper`: the paper's prediction for a network under switches, and its best fit.
"""

from lim.theory import cesaro, density, kernel, paper
from lim.theory.kernel import effective_strengths

__all__ = ["cesaro", "density", "effective_strengths", "kernel", "paper"]
