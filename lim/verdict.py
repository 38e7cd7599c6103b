"""From numbers with errors to a verdict: conditions on statistics, and how often chance would decide.

A claim has a core, without which its words are not true, and a form: the formula or the number that it gives. It does
not hold where the core fails, holds with a qualification where the form alone fails, and holds where both stand. What it
speaks of must be there: where a given lacks, nothing was put to the test, and it is not run.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import scipy

HOLDS, QUALIFIED, FAILS, NOT_RUN = "holds", "holds with a qualification", "does not hold", "not run"
GIVEN, CORE, FORM = "given", "core", "form"


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A measured or computed number.

    Attributes:
      value: the number, or with `log` the natural logarithm of a factor.
      error: its standard error, of the logarithm with `log`; 0 for what was computed and not drawn, inf where it is not known.
      words: what it is, as one reads it in a table.
      log: whether it is shown as the factor e^value.
      freedom: degrees of freedom of the error, one less than there are networks; its intervals are Student's.

    Raises:
      ValueError: the value is NaN, the error is not at least 0, or there is no degree of freedom.
    """

    value: float
    error: float
    words: str
    log: bool = False
    freedom: float = math.inf

    def __post_init__(self):
        if math.isnan(self.value) or not (self.error >= 0 and self.freedom >= 1):
            raise ValueError(f"{self.words}: {self.value} ± {self.error} ({self.freedom} degrees of freedom): must be a number, with an "
                             "error of at least 0 and at least 1 degree of freedom")  # fmt: skip

    @property
    def shown(self) -> str:
        """The number and its error as text, rounded where the error begins: ± ? where it is not known, ×/÷ from half a unit of ln on."""
        if not self.log:
            return rounded(self.value, self.error)
        if abs(self.value) > 700:
            return rounded(self.value / math.log(10), self.error / math.log(10)) + " decades"
        factor = math.exp(self.value)
        if 0.5 <= self.error < math.inf:  # e^value is far from the middle of its interval
            return f"{rounded(factor, digits=2)} ×/÷ {rounded(math.exp(min(self.error, 700)), digits=2)}"
        off = abs(factor - 1)
        if self.error == 0 and 0 < off < 0.01:
            return f"{factor:.{-math.floor(math.log10(off))}f}"
        return rounded(factor, factor * self.error)


@dataclasses.dataclass(frozen=True)
class Condition:
    """One threshold: `low` ≤ statistic ≤ `high`.

    Attributes:
      statistic: its name in the evidence.
      low, high: in the statistic's own unit, so a logarithm where it is one.
      part: `GIVEN`, `CORE` or `FORM`.
      why: the reason for the threshold.
      otherwise: a clause that says what is the case where it fails; {name} stands for a statistic as shown.
    """

    statistic: str
    part: str
    why: str
    otherwise: str
    low: float = -math.inf
    high: float = math.inf

    def met(self, statistics: Mapping[str, Statistic]) -> bool:
        """Whether it is met by these statistics, name → `Statistic`."""
        return self.low <= statistics[self.statistic].value <= self.high

    def chance(self, statistics: Mapping[str, Statistic]) -> float:
        """How often a run with other seeds would meet it.

        Both that run's value and this one's scatter about the truth, so their difference has √2 times the standard error, and over
        its estimate follows Student's law. Where the error is not known, nothing is: one half.
        """
        s = statistics[self.statistic]
        if s.error == 0:
            return float(self.met(statistics))
        if s.error == math.inf:
            return 0.5
        spread, law = math.sqrt(2) * s.error, scipy.stats.t(s.freedom)
        return float(law.cdf((self.high - s.value) / spread) - law.cdf((self.low - s.value) / spread))

    def close(self, statistics: Mapping[str, Statistic]) -> bool:
        """Whether a threshold lies within the statistic's 95 % interval, Student's; always, where the error is not known."""
        s = statistics[self.statistic]
        if s.error in (0, math.inf):
            return s.error > 0
        return min(abs(s.value - self.low), abs(s.value - self.high)) <= scipy.stats.t(s.freedom).ppf(0.975) * s.error

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
      chance: how often another run of the same size would give another verdict; nan where nothing was measured.
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
    parts = (GIVEN, CORE, FORM)
    first = next((part for part in parts if any(c.part == part for c in failed)), None)
    verdict = {GIVEN: NOT_RUN, CORE: FAILS, FORM: QUALIFIED, None: HOLDS}[first]
    given, core, form = (math.prod(c.chance(statistics) for c in conditions if c.part == part) for part in parts)
    same = {NOT_RUN: 1 - given, FAILS: given * (1 - core), QUALIFIED: given * core * (1 - form), HOLDS: given * core * form}[verdict]
    heard = [c for c in conditions if c.part == GIVEN or first != GIVEN]
    said = [c.otherwise for c in failed if c.part == first]
    shown = {name: s.shown for name, s in statistics.items()}
    sentence = "; ".join(dict.fromkeys(clause.format(**shown) for clause in said))
    return Decision(verdict, sentence, 1 - same, tuple(dict.fromkeys(c.statistic for c in heard if c.close(statistics))))


def rounded(value: float, error: float = 0.0, digits: int = 4) -> str:
    """A number to the digits that its error bears (two where the error begins with 1, else one), with the error behind ±.

    Without an error, or where it is infinite (not known), to so many digits, below a hundred thousand without a power of ten.
    """
    if not math.isfinite(value):
        return ("∞" if value > 0 else "−∞" if value < 0 else "–") + (" ± ?" if error else "")
    if error == math.inf:
        return f"{rounded(value, digits=digits)} ± ?"
    power = math.floor(math.log10(abs(value))) if value else 0
    if not -4 <= power < 5:
        mantissa = rounded(value / 10.0**power, error / 10.0**power, min(digits, 3))
        return f"({mantissa})·10{_superscript(power)}" if error else f"{mantissa}·10{_superscript(power)}"
    if not error:
        text = f"{value:.{max(digits - 1 - power, 0)}f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")
    mantissa, exponent = f"{error:.1e}".split("e")
    decimals = max((mantissa < "2") - int(exponent), 0)
    if decimals > 6:
        return f"{value:.6g} ± {error:.0e}".replace("-", "−")
    return f"{value:.{decimals}f} ± {error:.{decimals}f}".replace("-", "−")


def _superscript(power) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
