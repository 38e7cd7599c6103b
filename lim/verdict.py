"""From numbers with errors to a verdict: conditions on statistics, and how often chance would decide.

A claim has a core, without which its words are not true, and a form: the formula or the number that it gives. It does
not hold where the core fails, holds with a qualification where the form alone fails, and holds where both stand.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import scipy

HOLDS, QUALIFIED, FAILS, NOT_RUN = "holds", "holds with a qualification", "does not hold", "not run"


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A measured or computed number.

    Attributes:
      value: the number, or with `log` the natural logarithm of a factor.
      error: its standard error, of the logarithm with `log`; 0 for what was computed and not drawn.
      words: what it is, as one reads it in a table.
      log: whether it is shown as the factor e^value.

    Raises:
      ValueError: the value is NaN, or the error is not a number of at least 0.
    """

    value: float
    error: float
    words: str
    log: bool = False

    def __post_init__(self):
        if math.isnan(self.value) or not 0 <= self.error < math.inf:
            raise ValueError(f"{self.words}: {self.value} ± {self.error}: must be a number, with an error of at least 0")

    @property
    def shown(self) -> str:
        """The number and its error as text, rounded where the error begins."""
        if not self.log:
            return rounded(self.value, self.error)
        if abs(self.value) > 700:
            return rounded(self.value / math.log(10), self.error / math.log(10)) + " decades"
        return rounded(math.exp(self.value), math.exp(self.value) * self.error)


@dataclasses.dataclass(frozen=True)
class Condition:
    """One threshold: `low` ≤ statistic ≤ `high`.

    Attributes:
      statistic: its name in the evidence.
      low, high: in the statistic's own unit, so a logarithm where it is one.
      core: whether it belongs to the core or to the form.
      why: the reason for the threshold.
      otherwise: a clause that says what is the case where it fails; {name} stands for a statistic as shown.
    """

    statistic: str
    core: bool
    why: str
    otherwise: str
    low: float = -math.inf
    high: float = math.inf

    def met(self, statistics: Mapping[str, Statistic]) -> bool:
        """Whether it is met by these statistics, name → `Statistic`."""
        return self.low <= statistics[self.statistic].value <= self.high

    def chance(self, statistics: Mapping[str, Statistic]) -> float:
        """How often a run with other seeds would meet it.

        Both that run's value and this one's scatter about the truth, so their difference has √2 times the standard error
        (normal approximation).
        """
        s = statistics[self.statistic]
        if s.error == 0:
            return float(self.met(statistics))
        spread = math.sqrt(2) * s.error
        return float(scipy.stats.norm.cdf((self.high - s.value) / spread) - scipy.stats.norm.cdf((self.low - s.value) / spread))

    def close(self, statistics: Mapping[str, Statistic]) -> bool:
        """Whether a threshold lies within the statistic's 95 % interval."""
        s = statistics[self.statistic]
        return min(abs(s.value - self.low), abs(s.value - self.high)) <= scipy.stats.norm.ppf(0.975) * s.error and s.error > 0

    @property
    def part(self) -> str:
        """Which of the two it belongs to, "core" or "form"."""
        return "core" if self.core else "form"

    def threshold(self, statistics: Mapping[str, Statistic]) -> str:
        """The allowed range as text, in the unit in which the statistic is shown."""
        s = statistics[self.statistic]
        low, high = (f"{math.exp(x) if s.log else x:.4g}" for x in (self.low, self.high))
        if self.high == math.inf:
            return f"at least {low}"
        return f"at most {high}" if self.low == -math.inf else f"{low} to {high}"


@dataclasses.dataclass(frozen=True)
class Decision:
    """A verdict.

    Attributes:
      verdict: "holds", "holds with a qualification", "does not hold" or "not run".
      sentence: the qualification, what fails, or why it was not run; empty where the claim simply holds.
      chance: how often another run of the same size would give another verdict; nan where not run.
      close: names of the statistics whose 95 % interval reaches over a threshold.
    """

    verdict: str
    sentence: str = ""
    chance: float = math.nan
    close: tuple = ()


def decide(conditions: Sequence[Condition], statistics: Mapping[str, Statistic]) -> Decision:
    """The verdict of conditions on statistics; a pure function.

    The chance of another verdict takes the conditions for independent. Statistics of one run share seeds, so it is a guide: too
    high where several conditions hold together, too low where several fail together.

    Args:
      conditions: a sequence of `Condition`.
      statistics: name → `Statistic`.

    Raises:
      ValueError: a condition asks for a statistic that is not there.
    """
    for condition in conditions:
        if condition.statistic not in statistics:
            raise ValueError(f"statistic {condition.statistic!r}: is not among {', '.join(statistics)}")
    failed = [c for c in conditions if not c.met(statistics)]
    verdict = FAILS if any(c.core for c in failed) else QUALIFIED if failed else HOLDS
    core = math.prod(c.chance(statistics) for c in conditions if c.core)
    form = math.prod(c.chance(statistics) for c in conditions if not c.core)
    same = {HOLDS: core * form, QUALIFIED: core * (1 - form), FAILS: 1 - core}[verdict]
    said = [c.otherwise for c in failed if c.core or verdict == QUALIFIED]
    shown = {name: s.shown for name, s in statistics.items()}
    sentence = "; ".join(dict.fromkeys(clause.format(**shown) for clause in said))
    return Decision(verdict, sentence, 1 - same, tuple(dict.fromkeys(c.statistic for c in conditions if c.close(statistics))))


def rounded(value: float, error: float = 0.0) -> str:
    """A number to the digits that its error bears (two where the error begins with 1, else one), with the error behind ±."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "–"
    power = math.floor(math.log10(abs(value))) if value else 0
    if not -4 <= power < 5:
        return f"({rounded(value / 10.0**power, error / 10.0**power)})·10{_superscript(power)}" if error else \
            f"{value / 10.0**power:.2f}·10{_superscript(power)}".replace("-", "−")  # fmt: skip
    if not error:
        return f"{value:.3g}".replace("-", "−")
    mantissa, exponent = f"{error:.1e}".split("e")
    decimals = max((mantissa < "2") - int(exponent), 0)
    if decimals > 6:
        return f"{value:.6g} ± {error:.0e}".replace("-", "−")
    return f"{value:.{decimals}f} ± {error:.{decimals}f}".replace("-", "−")


def _superscript(power) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
