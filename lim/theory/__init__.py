"""The mathematics, independent of the network that is measured: numbers and a Config in, profiles out.

* `cesaro`: the averaging operator at finite length, the paper's walk, and random values' second moments.
* `density`: its continuum limit, for a strength per layer.
* `kernel`: the real architectures at birth in absolute units, no free parameter; `effective_strengths`.
* `paper`: the paper's prediction for a network under switches, and its best fit.

`effective_strengths` of `kernel` and these modules are the public names.

    >>> config = lim.Config.preset("small")
    >>> predicted = lim.theory.kernel.predict(config, 128)
    >>> print(predicted.finite_width_L[[0, 64, 126, 127]].round(1))  # as lim.influence measures it, over seeds
    [332.2  12.5   6.8 207.3]
    >>> operator_L = lim.theory.paper.predict(config, 128, lim.Switches())
    >>> print(round(operator_L.sum(), 6))  # a share of attention at each position, without a unit
    1.0
"""

from lim.theory import cesaro, density, kernel, paper
from lim.theory.kernel import effective_strengths

__all__ = ["cesaro", "density", "effective_strengths", "kernel", "paper"]
