"""Every figure: influence profiles with their predictions, one at a time or as small multiples of a grid.

Both ends of a profile are where things happen, so positions lie on a logit axis: x = (j+½)/L, magnified alike at either
end, its ticks token numbers counted from 1. What a logarithmic axis cannot show (zeros, values far below) is marked.

Axes: L position. Positions are 0-based in arrays and in `lim.profile`, tokens are 1-based on every figure.
"""

import dataclasses
import math
import os
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import offset_copy
from numpy.typing import ArrayLike
from scipy.special import expit, logit

from lim import files, profile

INK, SOFT = "#222222", "#6b6b6b"
MEASURED = "#0072B2"
PREDICTED = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")  # Okabe and Ito: told apart by anyone
DASHES = ((0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 3)), (0, (3, 1)), (0, (1, 3)))
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7.5, "legend.frameon": False,
    "figure.facecolor": "white", "axes.facecolor": "white", "axes.edgecolor": SOFT, "axes.linewidth": 0.7,
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelcolor": INK,
    "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    # Fonts as outlines (svg) or embedded TrueType (pdf): a figure looks the same everywhere, and journals take it.
    # Without dates and random ids it is the same file when it is made again.
    "svg.fonttype": "path", "pdf.fonttype": 42, "svg.hashsalt": "lim",
}  # fmt: skip
UNDATED = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
HALO = dict(zorder=8, path_effects=[withStroke(linewidth=2.5, foreground="white")])
OFF_AXIS = "zero, or below the axis"
INFLUENCE = "influence  ‖∂ output / ∂ input‖"
WIDE = 1.3  # inches: a panel this wide has room for numbers over it
CAPTION_SIZE, CAPTION_LINE = 6.0, 0.11  # points; inches from line to line
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One panel of `grid_figure`.

    Attributes:
      label: the panel's title (left out where rows and columns are both named, and say it).
      measured_L: [L], or None for a cell without a result.
      stderr_L: [L] standard errors; NaN where not known.
      predicted_L: [L].
      coordinates: value of each grid axis, as in {"rope": "off", "residual": 0.5}.
      summary: the `profile.Summary` of measured_L, where its verdict knows standard errors.
      prediction: what predicted_L is, for the legend.
    """

    label: str
    measured_L: np.ndarray | None
    stderr_L: np.ndarray | None = None
    predicted_L: np.ndarray | None = None
    coordinates: Mapping = dataclasses.field(default_factory=dict)
    summary: profile.Summary | None = None
    prediction: str = "predicted"


def influence_figure(
    measured_L: ArrayLike, *, stderr_L: ArrayLike | None = None, curves: Mapping[str, ArrayLike | tuple[ArrayLike, ArrayLike]] | None = None,
    summary: profile.Summary | None = None, title: str = "", caption: str = "", ylabel: str = INFLUENCE, measured_label: str = "measured",
    error: str = "standard error", decades: float = 12, width: float = 6.5,
) -> Figure:  # fmt: skip
    """A measured profile, its band of ± 1 standard error, and curves beside it.

    First, middle, last and lowest position are marked, and the ratios of the ends to the middle printed.

    Args:
      measured_L: [L].
      stderr_L: [L] standard errors; NaN where not known (no band there).
      curves: label → profile [L], or label → (profile [L], relative band); the band, a number or [L], is drawn as
        profile·exp(± band).
      summary: the `profile.Summary` of measured_L, for its shape and the standard errors of its ratios.
      title: above the figure.
      caption: below it, in small monospace: the command that makes the figure again.
      ylabel, measured_label: label of the vertical axis, and of the measured line.
      error: what the standard errors are, for the legend; it is left out where none is above 0.
      decades: the vertical axis reaches about this far below the highest value; what lies below is marked at the edge.
      width: in inches.

    Raises:
      ValueError: a profile is not [L], holds NaN, infinity or a negative number; lengths differ; a standard error or
        band is negative; the summary is of another profile.
    """
    measured_L = profile.check_profile(measured_L, "measured")
    length, summary = len(measured_L), _check_summary(summary, "summary", measured_L)
    stderr_L = _check_band(stderr_L, "stderr", measured_L)
    curves = {label: _check_curve(label, curve, measured_L) for label, curve in (curves or {}).items()}
    with matplotlib.rc_context(STYLE):
        fig = Figure()
        ax, left, right, height = fig.subplots(), 0.72, 0.48, max(0.42 * width, 2.0)
        _position_axis(ax, length, width - left - right)
        _height_axis(ax, _limits(_heights(measured_L, stderr_L, curves), decades, room=0.33 / height))
        _draw(ax, measured_L, stderr_L, curves, measured_label + _error_label([stderr_L], error))
        if length > 2:
            _annotate(ax, measured_L, summary, narrow=width < 5)
        _lay_out(fig, np.array([[ax]]), width, height, left=left, right=right, title=title, caption=caption,
                 lengths=[length], ylabel=ylabel)  # fmt: skip
    return fig


def grid_figure(cells: Iterable[Cell], *, rows: str | None = None, cols: str | None = None, title: str = "", caption: str = "",
                ylabel: str = INFLUENCE, error: str = "standard error", share_y: bool = True, decades: float = 6, width: float = 7.0) -> Figure:  # fmt: skip
    """Small multiples: a panel per cell, measured (± 1 standard error) and predicted, on shared axes.

    Over each panel stand its shape and the ratios of first and last position to the middle.

    Args:
      cells: a sequence of `Cell`.
      rows, cols: names of grid axes that arrange the panels: each value of it a row or a column, in order of first
        appearance. With one of them, cells fill the other direction in their order; with neither, up to four columns.
      title, caption, ylabel, error, decades, width: as in `influence_figure`.
      share_y: one vertical axis for all; False gives each panel its own.

    Raises:
      ValueError: there is no cell, a cell lacks the coordinate asked for, two cells fall on one panel, or as
        `influence_figure`.
    """
    placed, row_names, col_names = _arrange(list(cells), rows, cols)
    data = {place: _check_cell(cell) for place, cell in placed.items()}
    heights = {place: _heights(*panel) if panel else [] for place, panel in data.items()}
    shared = _limits(sum(heights.values(), []), decades, room=0.08)
    lengths = sorted({len(panel[0]) for panel in data.values() if panel})
    left, right, between = 0.62, 0.42 if rows else 0.12, 0.16 if share_y else 0.42
    width = max(width, left + right + len(col_names) * (0.45 + between))  # many columns need a wider figure
    panel_width = (width - left - right - (len(col_names) - 1) * between) / len(col_names)
    names = {place: [] if rows and cols else textwrap.wrap(cell.label, int(17 * panel_width)) for place, cell in placed.items()}
    labels = 0.12 + 0.13 * max(map(len, names.values()))  # inches over a panel for its shape, and its name above
    measured_label = "measured" + _error_label((panel[1] for panel in data.values() if panel), error)
    predictions = list(dict.fromkeys(name for panel in data.values() if panel for name in panel[2]))
    with matplotlib.rc_context(STYLE):
        fig = Figure()
        axes = fig.subplots(len(row_names), len(col_names), squeeze=False)
        for place, ax in np.ndenumerate(axes):
            if place not in placed:
                ax.set_axis_off()
                continue
            panel = data[place]
            length = len(panel[0]) if panel else max(lengths, default=2)
            _position_axis(ax, length, panel_width, fontsize=6)
            _height_axis(ax, shared if share_y else _limits(heights[place], decades, room=0.08), fontsize=6)
            _panel_title(ax, "\n".join(names[place]), panel, placed[place].summary, panel_width)
            if panel:
                _draw(ax, *panel, measured_label, small=True, names=predictions)
            lowest = not any((below, place[1]) in placed for below in range(place[0] + 1, len(row_names)))
            ax.tick_params(labelbottom=lowest or len(lengths) > 1, labelleft=place[1] == 0 or not share_y)
        _name_lines(axes, rows, cols, row_names, col_names, 72 * labels + 4)
        panel_height = max(min(0.62 * panel_width, 1.9), 0.8, 1.6 / len(row_names))
        _lay_out(fig, axes, width, panel_height, left=left, right=right, between=between,
                 gap=0.1 + labels + 0.17 * (len(lengths) > 1), head=labels + 0.2 * bool(cols), title=title,
                 caption=caption, lengths=lengths, ylabel=ylabel)  # fmt: skip
    return fig


def save(fig: Figure, path: str | os.PathLike) -> pathlib.Path:
    """Writes a figure as png, svg or pdf, by the path's suffix; makes the folder; a reader never sees half a file.

    Raises:
      ValueError: the suffix is none of these.
    """
    path = pathlib.Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in UNDATED:
        raise ValueError(f"path={str(path)!r}: its suffix must be one of {', '.join('.' + kind for kind in UNDATED)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.whole(path) as partial, matplotlib.rc_context(STYLE):
        fig.savefig(partial, format=kind, dpi=200, metadata=UNDATED[kind])
    return path


# --- what is drawn in one panel ---------------------------------------------------------------------------------------


def _draw(ax, measured_L, stderr_L, curves, measured_label, small=False, names=None):
    """Lines and bands, and a row of marks per line at the lower edge where it is zero or below the axis.

    The limits of the axis are set before: a line leaves through the lower edge, as it would for lower values yet. `names` are the
    curves of all panels, so that each has its colour in every one of them.
    """
    edges = None if stderr_L is None else (measured_L - stderr_L, measured_L + stderr_L)
    lines: list[tuple] = [(measured_label, measured_L, edges, MEASURED, "-")]
    for label, (curve_L, band_L) in curves.items():
        number = (names or list(curves)).index(label)
        edges = None if band_L is None else (curve_L * np.exp(-band_L), curve_L * np.exp(band_L))
        lines.append((label, curve_L, edges, PREDICTED[number % len(PREDICTED)], DASHES[number % len(DASHES)]))
    x_L, bottom = positions(len(measured_L)), ax.get_ylim()[0]
    for row, (label, line_L, edges, color, dash) in enumerate(lines):
        ax.plot(x_L, line_L, color=color, ls=dash, lw=1.1 if small else 1.4, label=label, zorder=3 + (row > 0),
                **_dots(x_L, seen=row == 0 and not small))  # fmt: skip
        if edges is not None:
            lower_L = np.maximum(edges[0], bottom / 10)  # a polygon needs corners that are not infinitely far
            ax.fill_between(x_L, lower_L, edges[1], color=color, alpha=0.22, lw=0, zorder=2 - (row > 0))
        _mark_below(ax, x_L, line_L, color, small)


def _mark_below(ax, x_L, line_L, color, small=False):
    """A row of marks over those that are there, where a line is zero or below the axis."""
    below = _spaced(x_L[line_L < ax.get_ylim()[0]], gap=0.7 if small else 0.35)
    if len(below):
        rows_of_marks = sum(line.get_label() == "_below" for line in ax.lines)
        edge = offset_copy(ax.get_xaxis_transform(), ax.get_figure(), y=3 + 5 * rows_of_marks, units="points")
        ax.plot(below, np.zeros(len(below)), "v", transform=edge, ms=2.6 if small else 3.6, mfc="white", mec=color,
                mew=0.6 if small else 0.8, label="_below", zorder=6, clip_on=False)  # fmt: skip


def _error_label(stderrs, error) -> str:
    return f" ± 1 {error}" if any(e is not None and np.any(np.nan_to_num(e) > 0) for e in stderrs) else ""


def _dots(x_L, seen):
    """Dots where tokens are far enough apart to be seen one by one; a single position is nothing but its dot."""
    if len(x_L) == 1:
        return dict(marker="o", ms=4)
    return dict(marker="o", ms=3, markevery=np.flatnonzero(np.gradient(logit(x_L)) > 0.15)) if seen else {}


def _annotate(ax, measured_L, summary, narrow):
    """Marks first, middle, last and lowest position; says what they are at the edges that `_limits` keeps free."""
    x_L, bottom, across = positions(len(measured_L)), ax.get_ylim()[0], ax.get_xaxis_transform()
    equals, points = "\n" if narrow else " = ", dict(textcoords="offset points", fontsize=6 if narrow else 7, **HALO)
    for text, x, dx, side in (
        (f"first/middle{equals}{_number(summary.primacy, summary.primacy_se)}", 0, 6, "left"),
        (f"shape{equals}{_verdict(summary)}", 0.5, 0, "center"),
        (f"last/middle{equals}{_number(summary.recency, summary.recency_se)}", 1, -3, "right"),
    ):
        ax.annotate(text, (x, 1), xytext=(dx, -3), xycoords="axes fraction", ha=side, va="top", **points)
    marks = [(x_L[0], summary.first), (0.5, summary.middle), (x_L[-1], summary.last)]
    x, lowest = x_L[summary.valley], measured_L[summary.valley]
    if lowest >= bottom:
        marks.append((x, lowest))
        side = "left" if x < 0.1 else "right" if x > 0.9 else "center"
        over_marks = 4 + 5 * sum(line.get_label() == "_below" for line in ax.lines)
        ax.annotate(f"lowest: token {summary.valley + 1}", (x, 0), xytext=(0, over_marks), xycoords=across, ha=side,
                    va="bottom", **points)  # fmt: skip
    if summary.middle >= bottom:
        ax.axhline(summary.middle, color=SOFT, lw=0.6, ls=(0, (1, 2)), zorder=0)
        ax.annotate("middle", (1, summary.middle), xytext=(3, 0), xycoords=ax.get_yaxis_transform(), color=SOFT,
                    va="center", **points)  # fmt: skip
    for x, y in marks:
        if y >= bottom:
            ax.plot([x], [y], "o", ms=4, mfc="white", mec=INK, mew=0.9, zorder=7, label="_mark")


def _panel_title(ax, label, panel, summary, panel_width):
    said = ""
    if panel:
        summary = summary or profile.summarize(panel[0])
        said = _verdict(summary)
        if panel_width > WIDE:
            said += f" · first {_number(summary.primacy, digits=2)} · last {_number(summary.recency, digits=2)}"
    else:
        ax.text(0.5, 0.5, "no result", transform=ax.transAxes, ha="center", va="center", color=SOFT)
    above = dict(xycoords="axes fraction", textcoords="offset points")
    ax.annotate(said, (0, 1), xytext=(0, 2), color=SOFT, fontsize=5.8, **above)
    ax.annotate(label, (0, 1), xytext=(0, 10), fontsize=7, fontweight="bold", **above)


def _verdict(summary) -> str:
    return "delta" if summary.delta else summary.shape


def _number(value, stderr=math.nan, digits=3) -> str:
    """A number as one reads it, 19.0 ± 0.4 or (6.1 ± 0.2)·10⁴: rounded where its standard error begins."""
    if not math.isfinite(value):
        return "0/0" if math.isnan(value) else "∞"
    power = int(f"{max(abs(value), stderr if math.isfinite(stderr) else 0):.{digits - 1}e}".split("e")[1])
    unit = 0 if -2 <= power < 4 else power
    value, times = value / 10.0**unit, f"·10{_superscript(unit)}" if unit else ""
    if not (math.isfinite(stderr) and stderr > 0):
        return f"{value:.{max(digits - 1 - power + unit, 0)}f}{times}"
    stderr = stderr / 10.0**unit
    mantissa, exponent = f"{stderr:.1e}".split("e")
    decimals = max((mantissa < "2") - int(exponent), 0)  # two digits of an error that begins with 1, else one
    text = f"{value:.{decimals}f} ± {stderr:.{decimals}f}"
    return f"({text}){times}" if times else text


def _superscript(power) -> str:
    return str(round(power)).translate(SUPERSCRIPT)


# --- axes -------------------------------------------------------------------------------------------------------------


def positions(length: int) -> np.ndarray:
    """Where each position lies on the axis, [L]: (j+½)/L, inside (0, 1) and mirrored about the middle."""
    return (np.arange(length) + 0.5) / length


def position_ticks(length: int, em: float) -> tuple[np.ndarray, list[str]]:
    """Ticks of the position axis: tokens 1, 2, 5, 10, … on the left, L, L-1, L-2, L-5, … on the right, and the middle.

    Args:
      length: L.
      em: width of the font's em, in logits: labels that would touch are left out, those nearest to an end stay.

    Returns:
      (x, labels).
    """

    if length == 1:
        return np.array([0.5]), ["1"]

    def half_width(label):
        return em * (0.35 * len(label) + 0.25)

    steps = [step * 10**k for k in range(len(str(length))) for step in (1, 2, 5)]
    centre = (length + 1) // 2
    left = [(step, str(step)) for step in steps if step < centre or step == 1]
    right = [(length - step, f"L−{step}" if step else "L") for step in [0] + steps if step < length // 2]
    ticks, clear = [], 0.0
    if length > 2:
        ticks = [(centre, str(centre))]
        clear = abs(logit((centre - 0.5) / length)) + half_width(str(centre))
    for side in (left, right):
        reach = math.inf  # how far from the middle the last label on this side begins
        for token, label in side:
            distance, half = abs(logit((token - 0.5) / length)), half_width(label)
            if distance + half <= reach and distance - half >= clear:
                ticks.append((token, label))
                reach = distance - half
    ticks.sort()
    return np.array([(token - 0.5) / length for token, _ in ticks]), [label for _, label in ticks]


def _position_axis(ax, length, inches, fontsize=7.5, fraction=False):
    """Tokens of one length, or (`fraction`) decimal fractions of texts of several, as wide as this one needs."""
    edge = 1.08 * math.log(2 * length) if length > 1 else 1.0
    ax.set_xscale("logit")
    ax.set_xlim(*expit([-edge, edge]))
    x, labels = position_ticks(length, em=2 * edge * fontsize / 72 / inches)
    if fraction:
        ends = [10.0**-k for k in range(1, len(str(2 * length)))]
        x = np.array([*sorted(ends), 0.5, *(1 - end for end in ends)])
        labels = [f"{place:.{max(len(str(2 * length)) - 1, 1)}f}".rstrip("0") for place in x]
    ax.xaxis.set(major_locator=FixedLocator(x.tolist()), major_formatter=FixedFormatter(labels))
    ax.xaxis.set(minor_locator=NullLocator(), minor_formatter=NullFormatter())
    ax.tick_params(axis="x", labelsize=fontsize, length=3, width=0.6)


def _height_axis(ax, limits, fontsize=7.5):
    low, high = np.log10(limits)
    plain = low > -4 and high < 4 and high - low < 4.5
    # With hardly a power of ten in sight, what lies between is labelled too.
    between = "23456789" if high - low < 0.8 else "25" if high - low < 1.6 else ""

    def power(value, _):
        return f"{value:g}" if plain else f"10{_superscript(math.log10(value))}"

    none = math.ceil(low) > math.floor(high)  # no power of ten in sight at all

    def multiple(value, _):
        digit, power = f"{value:.0e}".split("e")
        if digit not in between or not (plain or none):
            return ""
        return f"{value:g}" if plain else f"{digit}·10{_superscript(int(power))}"

    ax.set_yscale("log", nonpositive="clip")
    ax.set_ylim(*limits)
    ax.yaxis.set(major_formatter=FuncFormatter(power), major_locator=LogLocator(numticks=7 if fontsize > 7 else 5))
    ax.yaxis.set(minor_formatter=FuncFormatter(multiple))
    ax.tick_params(axis="y", which="both", labelsize=fontsize, length=3, width=0.6)
    ax.tick_params(axis="y", which="minor", length=1.5, width=0.4)
    ax.grid(axis="y", color="#e6e6e6", lw=0.5)
    ax.set_axisbelow(True)


def _heights(measured_L, stderr_L, curves):
    """All that the vertical axis of a panel must hold; the lower edge of a band may leave it."""
    heights = [measured_L] if stderr_L is None else [measured_L, measured_L + np.nan_to_num(stderr_L)]
    for curve_L, band_L in curves.values():
        heights += [curve_L] if band_L is None else [curve_L, curve_L * np.exp(band_L)]
    return heights


def _limits(heights, decades, room):
    """Limits of a logarithmic axis for these heights, from the highest down to the lowest or so many decades.

    At each edge a fraction `room` of the axis is left for words, and an axis spans a factor 2 at least.
    """
    positive = np.concatenate([values[values > 0] for values in heights] or [np.empty(0)])
    if not len(positive):
        return 0.1, 1.0
    top = math.log10(positive.max())
    bottom = max(math.log10(positive.min()), top - decades)
    slack = max(0.3 - (top - bottom), 0) / 2
    pad = room / (1 - 2 * room) * (top - bottom + 2 * slack) + slack
    return 10.0 ** np.clip(bottom - pad, -300, 299), 10.0 ** np.clip(top + pad, -299, 300)


def _spaced(x, gap):
    """Some of the positions x, about `gap` logits apart."""
    return x[np.unique(np.floor(logit(x) / gap), return_index=True)[1]]


# --- the figure around the panels -------------------------------------------------------------------------------------


def _lay_out(fig, axes, width, panel_height, *, left, right, between=0.0, gap=0.0, head=0.0, title, caption, lengths, ylabel, xlabel=None):
    """Sizes the figure around its panels, all in inches: strips for title, legend and `head` above, for words below."""
    handles, lines = _legend_handles(axes.flat), _wrapped(caption, width - 0.2)
    letters = [len(label) + 9 for label in handles]
    columns = max(len(letters) if sum(letters) < 16 * width else int(16 * width / max(letters)), 1)
    n_rows, n_cols = axes.shape
    panel_width = (width - left - right - (n_cols - 1) * between) / n_cols
    below = 0.1 + CAPTION_LINE * len(lines) if lines else 0.03
    bottom, panels = below + 0.42, n_rows * panel_height + (n_rows - 1) * gap
    legend, above = 0.08 + 0.16 * math.ceil(len(letters) / columns), 0.3 if title else 0.06
    height = bottom + panels + head + legend + above
    fig.set_size_inches(width, height)
    fig.subplots_adjust(left=left / width, right=1 - right / width, bottom=bottom / height,
                        top=1 - (head + legend + above) / height, wspace=between / panel_width,
                        hspace=gap / panel_height)  # fmt: skip
    fig.legend(handles.values(), handles, loc="upper left", bbox_to_anchor=(0.09 / width, 1 - above / height),
               borderaxespad=0, borderpad=0, ncols=columns, handlelength=2.8, labelspacing=0.3)  # fmt: skip
    fig.suptitle(title, x=0.08 / width, y=1 - 0.08 / height, ha="left", va="top", fontsize=9.5, fontweight="bold")
    size = f"L = {lengths[0]}" if len(lengths) == 1 else "L"
    fig.supxlabel(f"{xlabel or f'token, of {size}'} (logit axis: both ends magnified)", x=(left + width - right) / 2 / width,
                  y=(below + 0.02) / height, va="bottom", fontsize=8)  # fmt: skip
    fig.supylabel(ylabel, x=0.07 / width, y=(bottom + panels / 2) / height, ha="left", fontsize=8)
    if axes.size > 1 and panel_width > WIDE:
        fig.text(1 - right / width, (below + 0.02) / height, "first, last: relative to the middle", fontsize=5.8,
                 color=SOFT, ha="right", va="bottom")  # fmt: skip
    fig.text(0.09 / width, 0.05 / height, "\n".join(lines), family="DejaVu Sans Mono", fontsize=CAPTION_SIZE,
             color=SOFT, va="bottom", linespacing=1.15)  # fmt: skip


def _wrapped(caption, inches):
    """The lines of a caption; flags and paths are not broken unless they are longer than a line."""
    letters = int(inches / (0.602 * CAPTION_SIZE / 72))  # DejaVu Sans Mono is 0.602 em wide
    paragraphs = (textwrap.wrap(text, letters, break_on_hyphens=False) or [""] for text in caption.splitlines())
    return [line for paragraph in paragraphs for line in paragraph]


def _legend_handles(axes):
    """Label → handle over all panels, each once, and one for the marks of what is below the axis."""
    found: dict[str, Any] = {}
    below = False
    for ax in axes:
        below |= any(line.get_label() == "_below" for line in ax.lines)
        for handle, label in zip(*ax.get_legend_handles_labels()):
            found.setdefault(label, handle)
    if below:
        found[OFF_AXIS] = Line2D([], [], ls="none", marker="v", ms=3.5, mfc="white", mec=SOFT, mew=0.8)
    return found


def _name_lines(axes, rows, cols, row_names, col_names, above):
    """Writes the value of the grid axes over each column and beside each row."""
    bold = dict(xycoords="axes fraction", textcoords="offset points", fontsize=7.5, fontweight="bold")
    for ax, name in zip(axes[0], col_names if cols else ()):
        ax.annotate(f"{cols} = {name}", (0.5, 1), xytext=(0, above), ha="center", **bold)
    for ax, name in zip(axes[:, -1], row_names if rows else ()):
        ax.annotate(f"{rows}\n{name}", (1, 0.5), xytext=(5, 0), rotation=-90, va="center", ha="left",
                    multialignment="center", **bold)  # fmt: skip


def _arrange(cells, rows, cols):
    """Which cell lies where: {(row, column): cell}, and the names of rows and columns."""
    if not cells:
        raise ValueError("cells: must hold at least one cell")
    for cell in cells:
        for axis in (rows, cols):
            if axis is not None and axis not in cell.coordinates:
                raise ValueError(f"cell {cell.label!r} has no coordinate {axis!r}: it has {list(cell.coordinates)}")
    if rows is None and cols is None:
        n_cols = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3, 9: 3}.get(len(cells), 4)
        return {divmod(number, n_cols): cell for number, cell in enumerate(cells)}, [None] * math.ceil(len(cells) / n_cols), [None] * n_cols
    names = {axis: list(dict.fromkeys(cell.coordinates[axis] for cell in cells)) for axis in (rows, cols) if axis}
    placed: dict[tuple, Cell] = {}
    filled: dict[int | None, int] = {}
    for cell in cells:
        place = [names[axis].index(cell.coordinates[axis]) if axis else None for axis in (rows, cols)]
        if None in place:  # the direction without a name fills up in order
            free = place.index(None)
            line = place[1 - free]
            place[free] = filled[line] = filled.get(line, -1) + 1
        if tuple(place) in placed:
            raise ValueError(f"cells {placed[tuple(place)].label!r} and {cell.label!r} have the same {rows} and {cols}")
        placed[tuple(place)] = cell
    unnamed = [None] * (1 + max(filled.values(), default=0))
    return placed, names.get(rows, unnamed), names.get(cols, unnamed)


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_curve(name, curve, measured_L):
    """(curve [L], relative band [L] or None)."""
    curve_L, band = curve if isinstance(curve, tuple) else (curve, None)
    curve_L = profile.check_profile(curve_L, f"curve {name!r}")
    if len(curve_L) != len(measured_L):
        raise ValueError(f"curve {name!r} has {len(curve_L)} positions: measured has {len(measured_L)}")
    if band is not None and np.ndim(band) == 0:
        band = np.full(len(curve_L), band)
    return curve_L, _check_band(band, f"band of {name!r}", measured_L)


def _check_band(band_L, name, measured_L):
    if band_L is None:
        return None
    band_L = np.asarray(band_L, np.float64)
    if band_L.shape != measured_L.shape:
        raise ValueError(f"{name} has shape {band_L.shape}: measured has {measured_L.shape}")
    if np.any(band_L < 0) or np.any(np.isinf(band_L)):
        raise ValueError(f"{name}: must be finite and not negative, or NaN where it is not known")
    return band_L


def _check_summary(summary, name, measured_L):
    """The summary given, or measured's own; 1e-5 admits one of float32 numbers."""
    own = profile.summarize(measured_L)
    summary = summary or own
    if not np.allclose([summary.length, summary.first, summary.last], [own.length, own.first, own.last], 1e-5, 0):
        raise ValueError(f"{name}: is of another profile than measured")
    return summary


def _check_cell(cell: Cell) -> tuple[np.ndarray, np.ndarray | None, dict] | None:
    """(measured, standard error, curves) of a cell, or None for one without a result."""
    if cell.measured_L is None:
        return None
    measured_L = profile.check_profile(cell.measured_L, f"measured of {cell.label!r}")
    stderr_L = _check_band(cell.stderr_L, f"stderr of {cell.label!r}", measured_L)
    _check_summary(cell.summary, f"summary of {cell.label!r}", measured_L)
    if cell.predicted_L is None:
        return measured_L, stderr_L, {}
    return measured_L, stderr_L, {cell.prediction: _check_curve(cell.label, cell.predicted_L, measured_L)}


# --- curves against a size --------------------------------------------------------------------------------------------


def convergence_figure(sizes: Sequence[float] | np.ndarray, series: Mapping[str, tuple], *, xlabel: str, ylabel: str, title: str = "", caption: str = "",
                       yscale: str = "linear", ticks: Sequence[float] | None = None, lines: str = "predicted", width: float = 6.5) -> Figure:  # fmt: skip
    """Measured points with error bars, and what is predicted of them as lines, against a size on a logarithmic axis.

    Args:
      sizes: the sizes, [P].
      series: label → (measured_P, stderr_P, predicted_P), each of which may be None; NaN leaves a point out.
      xlabel, ylabel, title, caption, width: as in `influence_figure`.
      yscale: "linear" or "log".
      ticks: sizes to label; default all.
      lines: what the lines are.

    Raises:
      ValueError: there is no series.
    """
    if not series:
        raise ValueError("series: must hold at least one")
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, 0.62 * width), layout="constrained")
        ax = fig.subplots()
        for i, (label, (measured_P, stderr_P, predicted_P)) in enumerate(series.items()):
            color = (MEASURED, *PREDICTED)[i % 7]
            if predicted_P is not None:
                ax.plot(sizes, predicted_P, color=color, linestyle=DASHES[0] if measured_P is not None else "-", linewidth=1.2)
            if measured_P is not None:
                shifted_P = np.asarray(sizes, float) * 1.015 ** (i - (len(series) - 1) / 2)  # bars side by side
                ax.errorbar(shifted_P, measured_P, stderr_P, color=color, fmt="o", markersize=3.5, capsize=2, linewidth=1)
            ax.plot([], [], color=color, marker="o" if measured_P is not None else None, markersize=3.5, label=label)
        ax.set(xscale="log", yscale=yscale, xlabel=xlabel, ylabel=ylabel)
        if yscale == "log":
            _height_axis(ax, ax.get_ylim(), 8)
        ax.xaxis.set_major_locator(FixedLocator(list(sizes if ticks is None else ticks)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.grid(axis="y", color="#e6e6e6", linewidth=0.6)
        measured_too = any(measured_P is not None and predicted_P is not None for measured_P, _, predicted_P in series.values())
        errors = " ± standard error" if any(stderr_P is not None for _, stderr_P, _ in series.values()) else ""
        ax.legend(title=f"points: measured{errors}; dashes: {lines}" if measured_too else None)
        ax.set_title(title, loc="left", fontsize=9, fontweight="bold")
        if caption:
            fig.supxlabel("\n".join(_wrapped(caption, width)), x=0.01, ha="left", fontsize=CAPTION_SIZE, family="monospace", color=SOFT)
    return fig


def change_figure(changes: Mapping[str, tuple], *, ylabel: str, title: str = "", yscale: str = "linear", width: float = 6.5) -> Figure:
    """Ratios of two profiles along the text, with a line where nothing changes.

    Args:
      changes: label → (ratio_L, stderr_L or None), all of one length; drawn with a band of ± 1 standard error.
      ylabel, title, width: as in `influence_figure`.
      yscale: "linear" or "log".

    Raises:
      ValueError: there is no ratio, or their lengths differ.
    """
    lengths = {len(ratio_L) for ratio_L, _ in changes.values()}
    if len(lengths) != 1:
        raise ValueError(f"changes: must be at least one, of one length, not {sorted(lengths)}")
    (length,) = lengths
    with matplotlib.rc_context(STYLE):
        fig = Figure()
        ax, left, right, height = fig.subplots(), 0.72, 0.2, max(0.4 * width, 2.0)
        _position_axis(ax, length, width - left - right)
        ax.axhline(1, color=SOFT, lw=0.7, ls=(0, (1, 2)), zorder=0)
        for number, (label, (ratio_L, stderr_L)) in enumerate(changes.items()):
            ratio_L, color = np.asarray(ratio_L, np.float64), (MEASURED, *PREDICTED)[number % 7]
            x_L = positions(len(ratio_L))
            ax.plot(x_L, ratio_L, color=color, lw=1.2, ls="-" if number == 0 else DASHES[(number - 1) % len(DASHES)], label=label)
            if stderr_L is not None:
                ax.fill_between(x_L, ratio_L - stderr_L, ratio_L + stderr_L, color=color, alpha=0.22, lw=0)
        ax.set_yscale(yscale)
        ax.tick_params(axis="y", labelsize=7.5)
        ax.grid(axis="y", color="#e6e6e6", lw=0.5)
        _lay_out(fig, np.array([[ax]]), width, height, left=left, right=right, title=title, caption="", lengths=[length],
                 ylabel=ylabel)  # fmt: skip
    return fig


# --- a number against the place in a context ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of `place_figure`.

    Attributes:
      title: what is drawn.
      curves: label → (values_N, low_N, high_N); the band between low and high is left out where they are None.
      floor: label and height of a level to compare with.
      ordered: the curves follow each other, so their colours do.
      yscale, ylim: as matplotlib's.
      places: of the values, [N], counted from 0; default all.
    """

    title: str
    curves: Mapping
    floor: tuple | None = None
    ordered: bool = False
    yscale: str = "linear"
    ylim: tuple | None = None
    places: np.ndarray | None = None


def place_figure(panels: Sequence[Panel], *, xlabel: str = "place of the pair in the context", title: str = "", caption: str = "",
                 width: float = 6.5) -> Figure:  # fmt: skip
    """Numbers against the place they belong to, counted from 1, in panels side by side; curves named once mean the same in each.

    Args:
      panels: one or more `Panel`.
      xlabel, title, caption, width: as in `influence_figure`.

    Raises:
      ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("panels: must hold at least one")
    with matplotlib.rc_context(STYLE):
        lines = _wrapped(caption, width - 0.2)
        names = max(len(panel.curves) + (panel.floor is not None) for panel in panels)
        height = max(0.62 * width / len(panels), 2.6) + 0.15 * math.ceil(names / 2) + CAPTION_LINE * len(lines)
        fig = Figure(figsize=(width, height), layout="constrained")
        shown = None
        for ax, panel in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels):
            colors: Sequence = (MEASURED, *PREDICTED)
            if panel.ordered:
                colors = list(matplotlib.colormaps["viridis"](np.linspace(0, 0.88, len(panel.curves))))
            for i, (label, (values_N, low_N, high_N)) in enumerate(panel.curves.items()):
                x_N = 1 + (np.arange(len(values_N)) if panel.places is None else np.asarray(panel.places))
                ax.plot(x_N, values_N, color=colors[i % len(colors)], lw=1.3, marker="o", ms=2.2, label=label)
                if low_N is not None:
                    ax.fill_between(x_N, low_N, high_N, color=colors[i % len(colors)], alpha=0.18, lw=0)
            if panel.floor is not None:
                ax.axhline(panel.floor[1], color=SOFT, lw=0.8, ls=DASHES[1], label=panel.floor[0])
            ax.set(xlabel=xlabel, yscale=panel.yscale, ylim=panel.ylim)
            ax.set_title(panel.title, loc="left")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.grid(axis="y", color="#e6e6e6", linewidth=0.6)
            if [*panel.curves] != shown:
                # below the axis: over the curves it would hide some of them
                ax.legend(fontsize=6.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
            shown = [*panel.curves]
        if title:
            fig.suptitle(title, x=0.01, ha="left", fontsize=9, fontweight="bold")
        if caption:
            fig.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=CAPTION_SIZE, family="monospace", color=SOFT)
    return fig


# --- over axes of a grid ----------------------------------------------------------------------------------------------


def bundle_figure(profiles: Mapping[Any, tuple], *, axis: str, title: str = "", caption: str = "", ylabel: str = INFLUENCE,
                  predicted: str = "predicted", decades: float = 9, width: float = 6.5) -> Figure:  # fmt: skip
    """Profiles along one axis of a grid in one panel, coloured in the axis' order; predictions dashed in the same colour.

    Args:
      profiles: value of the axis → (measured_L, predicted_L or None), in order; with several lengths the position is a fraction of
        the text, (j+½)/L.
      axis, predicted: its name, and what the predictions are, for the legend.
      title, caption, ylabel, decades, width: as in `influence_figure`.

    Raises:
      ValueError: there is no profile, or as `influence_figure`.
    """
    if not profiles:
        raise ValueError("profiles: must hold at least one")
    pairs = {}
    for name, (measured_L, predicted_L) in profiles.items():
        measured_L = profile.check_profile(measured_L, f"measured of {name!r}")
        pairs[name] = measured_L, None if predicted_L is None else _check_curve(name, predicted_L, measured_L)[0]
    heights = [values_L for pair in pairs.values() for values_L in pair if values_L is not None]
    lengths = sorted({len(measured_L) for measured_L, _ in pairs.values()})
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, len(pairs)))
    with matplotlib.rc_context(STYLE):
        fig = Figure()
        ax, left, right, height = fig.subplots(), 0.72, 0.2, max(0.5 * width, 2.0)
        _position_axis(ax, max(lengths), width - left - right, fraction=len(lengths) > 1)
        _height_axis(ax, _limits(heights, decades, room=0.05))
        for color, (name, (measured_L, predicted_L)) in zip(colors, pairs.items()):
            x_L = positions(len(measured_L))
            ax.plot(x_L, measured_L, color=color, lw=1.3, label=f"{axis} = {name}", zorder=3, **_dots(x_L, seen=True))
            if predicted_L is not None:
                ax.plot(x_L, predicted_L, color=color, lw=1.0, ls=DASHES[0], zorder=4)
            for line_L in (measured_L, predicted_L):
                if line_L is not None:
                    _mark_below(ax, x_L, line_L, color, small=True)
        if any(predicted_L is not None for _, predicted_L in pairs.values()):
            ax.plot([], [], color=SOFT, lw=1.0, ls=DASHES[0], label=predicted)
        _lay_out(fig, np.array([[ax]]), width, height, left=left, right=right, title=title, caption=caption,
                 lengths=lengths, ylabel=ylabel, xlabel="place in the text, as a fraction" if len(lengths) > 1 else None)  # fmt: skip
    return fig


def life_figure(steps: Sequence[int], profiles_ML: ArrayLike, *, label: str = "influence", caption: str = "", width: float = 6.5) -> Figure:
    """A valley's life: influence over its mean, by position and by the number of updates, a row for each measured step.

    Args:
      steps: numbers of updates, ascending, [M].
      profiles_ML: influence, positive.
      label: what it is, if not influence.
      caption, width: as in `influence_figure`.
    """
    profiles_ML = profile.check_profiles(profiles_ML)
    share_ML = profiles_ML / profiles_ML.mean(axis=1, keepdims=True)
    length = profiles_ML.shape[1]
    lines = _wrapped(caption, width - 0.2)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, 1.5 + 0.22 * len(steps) + CAPTION_LINE * len(lines)), layout="constrained")
        ax = fig.subplots()
        seen = share_ML[share_ML > 0]
        edge = 0.25 / length  # an axis of logits has no 0 and no 1
        borders = np.concatenate([[edge], np.arange(1, length) / length, [1 - edge]])
        image = ax.pcolormesh(borders, np.arange(len(steps) + 1), share_ML, norm=LogNorm(seen.min(), seen.max()), cmap="viridis", rasterized=True)
        _position_axis(ax, length, width - 1.8)
        ax.set_xlim(edge, 1 - edge)
        ax.set_yticks(np.arange(len(steps)) + 0.5, [str(step) for step in steps])
        ax.set(xlabel="position", ylabel="updates")
        ax.tick_params(axis="y", length=0)
        fig.colorbar(image, ax=ax, label=f"{label} / its mean over positions")
        if caption:
            fig.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=CAPTION_SIZE, family="monospace", color=SOFT)
    return fig


def lines_figure(x: ArrayLike, series: Mapping[str, tuple], *, xlabel: str, ylabel: str, levels: Mapping[str, float] | None = None,
                 title: str = "", caption: str = "", yscale: str = "linear", width: float = 6.5) -> Figure:  # fmt: skip
    """Lines over an evenly divided axis, with bands.

    Args:
      x: [X].
      series: label → (y_X, error_X): a band of one error on either side, or None.
      levels: label → height of a dashed line.
      xlabel, ylabel, title, caption, width: as in `influence_figure`.
      yscale: "linear" or "log".

    Raises:
      ValueError: there is no series.
    """
    if not series:
        raise ValueError("series: must hold at least one")
    lines = _wrapped(caption, width - 0.2)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, 0.5 * width + CAPTION_LINE * len(lines)), layout="constrained")
        ax = fig.subplots()
        colors = (MEASURED, *PREDICTED)
        for i, (label, (y_X, error_X)) in enumerate(series.items()):
            color = colors[i % len(colors)]
            ax.plot(x, y_X, color=color, linewidth=1.3, marker="o", markersize=2.5, label=label)
            if error_X is not None:
                ax.fill_between(x, np.subtract(y_X, error_X), np.add(y_X, error_X), color=color, alpha=0.18, linewidth=0)
        for label, level in (levels or {}).items():
            ax.axhline(level, color=SOFT, linestyle=DASHES[0], linewidth=1, label=label)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        if yscale == "log" and not any(np.any(np.asarray(y_X) > 0) for y_X, _ in series.values()):
            ax.text(0.5, 0.5, "zero everywhere", transform=ax.transAxes, ha="center", va="center", color=SOFT)
        elif yscale == "log":
            ax.set_yscale(yscale)
            _height_axis(ax, ax.get_ylim(), 8)
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        ax.grid(axis="y", color="#e6e6e6", linewidth=0.6)
        ax.legend()
        ax.set_title(title, loc="left", fontsize=9, fontweight="bold")
        if caption:
            fig.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=CAPTION_SIZE, family="monospace", color=SOFT)
    return fig


def heat_figure(panels: Mapping[str, ArrayLike], *, rows: str, cols: str, row_names: Sequence, col_names: Sequence, label: str,
                caption: str = "", width: float = 6.5) -> Figure:  # fmt: skip
    """One number per cell over two axes of a grid, on a logarithmic scale of colours, each written in its field.

    Args:
      panels: title → numbers [rows, cols], positive or infinite; NaN leaves a field empty.
      rows, cols: names of the two axes.
      row_names, col_names: their values.
      label: what the number is.
      caption, width: as in `influence_figure`.

    Raises:
      ValueError: there is no panel, or one has another shape.
    """
    arrays = {title: np.asarray(values_RC, np.float64) for title, values_RC in panels.items()}
    if not arrays or any(values_RC.shape != (len(row_names), len(col_names)) for values_RC in arrays.values()):
        raise ValueError(f"panels: must be at least one, of {len(row_names)} rows and {len(col_names)} columns")
    seen = np.concatenate([values_RC[np.isfinite(values_RC) & (values_RC > 0)] for values_RC in arrays.values()])
    low, high = (seen.min(), seen.max()) if len(seen) else (1.0, 1.0)
    high = max(high, 1.01 * low)
    norm = LogNorm(low, high, clip=True)
    across = min(len(arrays), max(1, int(width // (0.9 + 0.45 * len(col_names)))))
    down = math.ceil(len(arrays) / across)
    lines = _wrapped(caption, width - 0.2)
    with matplotlib.rc_context(STYLE | {"axes.spines.top": True, "axes.spines.right": True}):
        height = down * (0.55 + max(0.32 * len(row_names), 0.6)) + 0.55 + CAPTION_LINE * len(lines)
        fig = Figure(figsize=(width, height), layout="constrained")
        axes = fig.subplots(down, across, squeeze=False)
        for ax in axes.flat[len(arrays) :]:
            ax.set_axis_off()
        for ax, (title, values_RC) in zip(axes.flat, arrays.items()):
            image = ax.imshow(np.where(values_RC > 0, np.minimum(values_RC, high), np.nan), norm=norm, cmap="viridis", aspect="auto")
            ax.set(xlabel=cols, ylabel=rows)
            ax.set_xticks(range(len(col_names)), col_names)
            ax.set_yticks(range(len(row_names)), row_names)
            ax.tick_params(length=0)
            ax.set_title(title, loc="left", fontsize=8)
            for (row, col), value in np.ndenumerate(values_RC):
                dark = np.isfinite(value) and norm(value) < 0.6
                ax.text(col, row, "–" if np.isnan(value) else _number(value, digits=2), ha="center", va="center", fontsize=7,
                        color="white" if dark else INK)  # fmt: skip
        bar = fig.colorbar(image, ax=axes, fraction=0.05)
        ticks = np.geomspace(low, high, 3)
        bar.ax.yaxis.set(major_locator=FixedLocator(ticks.tolist()), minor_locator=NullLocator())
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value, digits=2)))
        fig.suptitle(label, x=0.01, ha="left", fontsize=9, fontweight="bold")
        if caption:
            fig.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=CAPTION_SIZE, family="monospace", color=SOFT)
    return fig
