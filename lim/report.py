"""The report: findings → one self-contained page, ledger first, then a section per claim.

It needs no network and no script. Figures stand on a light card, so that they read in light and dark; each is inlined as SVG
or PNG, whichever is smaller, with its text alternative.
"""

import base64
import collections
import io
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import jinja2
import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from lim import plot, verdict

if TYPE_CHECKING:  # the claims, and all that they import, are not needed to draw their page
    from lim.claims import Finding

STYLES = {verdict.HOLDS: "holds", verdict.QUALIFIED: "qualified", verdict.FAILS: "fails", verdict.NOT_RUN: "open"}
DPI = 144


def page(findings: Sequence["Finding"], *, scale: str, command: Callable[[str], str], run: dict) -> str:
    """The page as text.

    Args:
      findings: a sequence of `lim.claims.Finding`, in the ledger's order.
      scale: name of the scale.
      command: a function of a claim's number: the line that makes its section again.
      run: what a reader should know of the run, name → text: command, versions, device, sizes.
    """
    counts = collections.Counter(f.decision.verdict for f in findings)
    said = "; ".join(f"{name}: {counts[name]}" for name in STYLES if counts[name]).capitalize()
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True,
                                     trim_blocks=True, undefined=jinja2.StrictUndefined)  # fmt: skip
    rows = [_row(finding, command(finding.claim.number)) for finding in findings]
    return environment.get_template("report.html").render(rows=rows, scale=scale, counts=said, run=list(run.items()))


def ledger_table(findings: Iterable["Finding"]) -> str:
    """The ledger as a Markdown table, verdicts with what qualifies them."""
    lines = ["| | claim | paper | measured | verdict | chance of another |", "| --- | --- | --- | --- | --- | --- |"]
    for finding in findings:
        claim, decision = finding.claim, finding.decision
        statistics = finding.evidence.statistics if finding.evidence else {}
        measured = "; ".join(f"{s.words}: {s.shown}" for name in claim.headline if (s := statistics.get(name)))
        said = f"**{decision.verdict}**" + (f": {decision.sentence}" if decision.sentence else "")
        cells = (claim.number, claim.title, claim.paper, measured, said, percent(decision.chance))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _row(finding, command):
    claim, decision = finding.claim, finding.decision
    anchor = re.sub(r"\W+", "-", claim.number)
    row = dict(claim=claim, decision=decision, anchor=anchor, style=STYLES[decision.verdict], chance=percent(decision.chance),
               headline=[], numbers=[], pictures=[], close="", command=command)  # fmt: skip
    if finding.evidence is None:
        return row
    statistics = finding.evidence.statistics
    conditions = collections.defaultdict(list)
    for c in claim.conditions:
        conditions[c.statistic].append(dict(part=c.part, range=c.threshold(statistics), met=c.met(statistics), why=c.why))
    return row | dict(
        headline=[statistics[name] for name in claim.headline],
        numbers=[(s, conditions[name]) for name, s in statistics.items()],
        pictures=[(picture(figure, alt, f"f{anchor}-{i}"), alt) for i, (alt, figure) in enumerate(finding.evidence.figures)],
        close="; ".join(statistics[name].words for name in decision.close),
    )  # fmt: skip


def percent(chance: float) -> str:
    """A probability as text; a dash where it is not known."""
    if math.isnan(chance):
        return "–"
    return "under 0.1 %" if chance < 0.001 else f"{100 * chance:.2g} %" if chance < 0.995 else "over 99 %"


def picture(figure: Figure, alt: str, name: str) -> Markup:
    """A figure as an element of a page, SVG or PNG, whichever is smaller.

    Args:
      figure: a matplotlib Figure.
      alt: what it shows, in words.
      name: unique on the page; ids in the SVG begin with it.
    """
    svg, png = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context(plot.STYLE):
        figure.savefig(svg, format="svg", metadata=plot.UNDATED["svg"])
        figure.savefig(png, format="png", dpi=DPI)
    drawn = inline_svg(svg.getvalue(), alt, name)
    data = base64.b64encode(png.getvalue()).decode()
    if len(drawn) <= len(data):
        return Markup(drawn)
    return Markup('<img alt="{}" src="data:image/png;base64,{}">').format(alt, Markup(data))


def inline_svg(text: str, alt: str, name: str) -> str:
    """An SVG file's text as an element: no prologue, no metadata, ids of its own, paths to a hundredth of a point."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", text)
    text = re.sub(r'\bd="[^"]*"', lambda path: re.sub(r"(\.\d{2})\d+", r"\1", path[0]), text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)
