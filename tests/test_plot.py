"""lim.plot: what is drawn is what was given, nothing is hidden, words do not collide, files are whole."""

import itertools
import math

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lim import plot, profile

COMMAND = "python -m experiments.ablate --model=qwen2-0.5b --residual=0.5 --out=without-mask-and-with-half-a-skip"


def u_profile(length, seed=0):
    """Falls like ln²(1/x), with an anchor on the last position and 5 % scatter."""
    u_L = 0.05 + np.log(plot.positions(length)) ** 2
    u_L[-1] = 3.0
    return u_L * np.random.default_rng(seed).lognormal(0, 0.05, length)


def line(ax, label):
    (found,) = [artist for artist in ax.lines if artist.get_label() == label]
    return found


def marks_below(ax):
    return [artist for artist in ax.lines if artist.get_label() == "_below"]


def band(ax, number=0):
    """(x, lower and upper edges at once) of a filled band."""
    return ax.collections[number].get_paths()[0].vertices


def legend(fig):
    return [text.get_text() for text in fig.legends[0].get_texts()]


def texts(fig):
    """Every text that is seen: matplotlib also keeps labels of ticks beyond the axis."""
    seen = [text for holder in (fig, *fig.axes) for text in holder.texts]
    seen += [text for box in fig.legends for text in box.get_texts()]
    for ax in fig.axes:
        for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if ax.axison and tick.label1.get_visible() and low <= tick.get_loc() <= high:
                    seen.append(tick.label1)
    return [text for text in seen if text.get_text().strip()]


def words(fig):
    return [text.get_text() for text in texts(fig)]


def check_words(fig):
    """Every word that is seen lies inside the figure, and no two overlap by more than a pixel each way."""
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts(fig)]
    for text, box in boxes:
        assert box.x0 > -1 and box.y0 > -1 and box.x1 < fig.bbox.x1 + 1 and box.y1 < fig.bbox.y1 + 1, text
    for (text, box), (other, other_box) in itertools.combinations(boxes, 2):
        width = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
        height = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
        assert width < 1 or height < 1, (text, other, width, height)


# --- one profile ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 64, 2048])
def test_lines_are_the_data(length):
    measured_L, predicted_L, other_L = u_profile(length), u_profile(length, 1), np.zeros(length)
    fig = plot.influence_figure(measured_L, curves={"theory": predicted_L, "nothing": other_L})
    (ax,) = fig.axes
    for label, given_L in (("measured", measured_L), ("theory", predicted_L), ("nothing", other_L)):
        drawn = line(ax, label)
        np.testing.assert_array_equal(drawn.get_xdata(), (np.arange(length) + 0.5) / length)
        np.testing.assert_array_equal(drawn.get_ydata(), given_L)
    assert line(ax, "measured").get_linestyle() == "-"
    assert line(ax, "theory").is_dashed()
    assert (ax.get_xscale(), ax.get_yscale()) == ("logit", "log")
    left, right = ax.get_xlim()
    assert left < 0.5 / length <= 1 - 0.5 / length < right
    assert left == pytest.approx(1 - right)


def test_bands_are_the_errors():
    measured_L, stderr_L, predicted_L = u_profile(64), 0.1 * u_profile(64, 1), u_profile(64, 2)
    relative_L = np.linspace(0.01, 0.1, 64)
    curves = {"scalar": (predicted_L, 0.03), "each": (predicted_L, relative_L), "none": predicted_L}
    fig = plot.influence_figure(measured_L, stderr_L=stderr_L, curves=curves, measured_label="seen")
    (ax,) = fig.axes
    assert len(ax.collections) == 3
    scaled = [(predicted_L * np.exp(-band), predicted_L * np.exp(band)) for band in (0.03, relative_L)]
    for number, pair in enumerate([(measured_L - stderr_L, measured_L + stderr_L), *scaled]):
        edges = {tuple(vertex) for vertex in band(ax, number)}
        for edge_L in pair:
            assert set(zip(plot.positions(64), edge_L)) <= edges
    assert legend(fig) == ["seen ± 1 standard error", "scalar", "each", "none"]


def test_a_band_wider_than_its_profile_leaves_through_the_bottom():
    fig = plot.influence_figure(np.ones(8), stderr_L=np.full(8, 2.0))
    (ax,) = fig.axes
    assert 0 < band(ax)[:, 1].min() < ax.get_ylim()[0]
    assert band(ax)[:, 1].max() == 3.0 < ax.get_ylim()[1]


@pytest.mark.filterwarnings("error")
def test_unknown_errors_draw_no_band():
    unknown_L = np.full(16, math.nan)
    fig = plot.influence_figure(u_profile(16), stderr_L=unknown_L)
    check_words(fig)
    assert legend(fig) == ["measured"]
    half_L = np.where(np.arange(16) < 8, 0.1, math.nan)
    fig = plot.influence_figure(np.ones(16), stderr_L=half_L)
    check_words(fig)
    assert band(fig.axes[0])[:, 0].max() < 0.5 and legend(fig) == ["measured ± 1 standard error"]


def test_a_prediction_that_scatters_by_factors_keeps_its_lower_edge():
    """A band of 1.5 is a factor of e^1.5 either way; 1 - 1.5 would be below nothing."""
    fig = plot.influence_figure(np.ones(8), curves={"theory": (np.ones(8), 1.5)})
    heights = band(fig.axes[0])[:, 1]
    np.testing.assert_allclose([heights.min(), heights.max()], np.exp([-1.5, 1.5]))
    assert fig.axes[0].get_ylim()[1] > np.exp(1.5)


def test_the_legend_says_what_the_errors_are_of_and_nothing_where_they_are_0():
    for figure in (plot.influence_figure, lambda p, stderr_L, error: plot.grid_figure([plot.Cell("a", p, stderr_L)], error=error)):
        assert legend(figure(np.ones(8), stderr_L=np.zeros(8), error="standard error of the probes")) == ["measured"]
        assert legend(figure(np.ones(8), stderr_L=np.full(8, 0.1), error="standard error of the probes")) == ["measured ± 1 standard error of the probes"]


@pytest.mark.parametrize("low, high, seen", [(2e-6, 3e-6, "2·10⁻⁶"), (3e4, 4.5e4, "4·10⁴"), (2e5, 3e5, "3·10⁵"), (2e-4, 3e-4, "0.0002")])
def test_an_axis_without_a_power_of_ten_has_labels(low, high, seen):
    fig = plot.influence_figure(np.linspace(high, low, 32))
    check_words(fig)
    assert seen in words(fig)
    check_words(plot.grid_figure([plot.Cell(name, np.linspace(high, low, 32)) for name in "abc"]))


@pytest.mark.filterwarnings("error")
def test_zeros_and_values_below_the_axis_are_marked():
    delta_L, tiny_L = np.zeros(64), np.full(64, 1e-30)
    delta_L[-1] = tiny_L[-1] = 1.0
    fig = plot.influence_figure(delta_L, curves={"tiny": tiny_L, "seen": np.full(64, 0.5)}, decades=12)
    (ax,) = fig.axes
    bottom = ax.get_ylim()[0]
    assert 1e-15 < bottom < 1e-12
    # A line falls to zero through the edge, without a gap.
    assert -math.inf < ax.transData.transform((0.5, 0.0))[1] < ax.bbox.y0
    rows = marks_below(ax)
    assert [row.get_markeredgecolor() for row in rows] == [plot.MEASURED, plot.PREDICTED[0]]
    for row in rows:  # marks stand only where the line is off the axis, from its first such position to its last
        x = row.get_xdata()
        assert set(x) <= set(plot.positions(64)[:-1]) and {plot.positions(64)[0], plot.positions(64)[62]} <= set(x)
    assert legend(fig)[-1] == plot.OFF_AXIS
    check_words(fig)
    # Nothing is off the axis: no mark.
    fig = plot.influence_figure(np.maximum(delta_L, 1e-3))
    assert not marks_below(fig.axes[0]) and plot.OFF_AXIS not in legend(fig)


def test_decades_decide_what_is_off_the_axis():
    steep_L = 10.0 ** -np.arange(21)
    for decades, below in ((30, 0), (12, 7)):  # the room for words shows 1.9 more
        ax = plot.influence_figure(steep_L, decades=decades).axes[0]
        assert (steep_L < ax.get_ylim()[0]).sum() == below
        assert bool(marks_below(ax)) == bool(below)
        assert ax.get_ylim()[1] > 1


@pytest.mark.filterwarnings("error")
def test_nothing_but_zeros_can_be_drawn():
    fig = plot.influence_figure(np.zeros(9))
    check_words(fig)
    assert "shape = flat" in words(fig) and len(marks_below(fig.axes[0])) == 1


def test_the_numbers_are_said():
    values = [8.0, 4.0, 3.0, 2.0, 1.0, 0.5, 6.0]
    said = words(plot.influence_figure(values, title="A title", caption=COMMAND, ylabel="height"))
    for text in ("first/middle = 4.00", "last/middle = 3.00", "shape = U", "lowest: token 6", "middle", "A title",
                 "height", "token, of L = 7 (logit axis: both ends magnified)"):  # fmt: skip
        assert text in said, text
    summary = profile.summarize(values, dict(primacy=2.9, recency=0.123))
    said = words(plot.influence_figure(values, summary=summary))
    assert "first/middle = 4 ± 3" in said and "last/middle = 3.00 ± 0.12" in said
    assert "shape = recency" in said  # the summary's verdict: 4 ± 2.9 is not told from 1


def test_marks_stand_on_the_profile():
    values = [8.0, 4.0, 3.0, 2.0, 1.0, 0.5, 6.0]
    ax = plot.influence_figure(values).axes[0]
    marks = {(artist.get_xdata()[0], artist.get_ydata()[0]) for artist in ax.lines if artist.get_label() == "_mark"}
    assert marks == {(0.5 / 7, 8.0), (0.5, 2.0), (6.5 / 7, 6.0), (5.5 / 7, 0.5)}


@pytest.mark.parametrize("width", [3.4, 3.7, 4.0, 4.3, 4.6, 5.0, 6.5])
def test_caption_holds_every_word_and_breaks_no_flag(width):
    fig = plot.influence_figure(u_profile(16), caption=COMMAND + "\nsecond line, commit 1234abc", width=width)
    (text,) = [t for t in fig.texts if "experiments.ablate" in t.get_text()]
    lines = text.get_text().split("\n")
    assert len(lines) >= 2 and lines[-1] == "second line, commit 1234abc"
    assert " ".join(lines[:-1]) == COMMAND
    assert text.get_family() == ["DejaVu Sans Mono"]
    assert text.get_position()[1] < fig.axes[0].get_position().y0
    check_words(fig)


@pytest.mark.parametrize("length", [3, 64, 2048])
@pytest.mark.parametrize("width", [3.4, 6.5])
def test_words_do_not_collide(length, width):
    """U, primacy, flat, delta, hump; two curves, bands, errors printed, a caption of several lines."""
    x_L = plot.positions(length)
    delta_L = np.zeros(length)
    delta_L[-1] = 1.0
    shapes = [u_profile(length), np.log(1 / x_L) ** 5, np.ones(length), delta_L, np.exp(-(((x_L - 0.5) * 9) ** 2))]
    for values in shapes:
        errors = {name: 0.013 * ratio for name, ratio in profile.ratios(values).items()}
        summary = profile.summarize(values, errors)
        fig = plot.influence_figure(
            values, stderr_L=0.1 * values, curves={"kernel theory": values, "constant α": np.sqrt(values)},
            summary=summary, title="A title of some words", caption=COMMAND, width=width,
        )  # fmt: skip
        check_words(fig)


@pytest.mark.parametrize(
    "value, stderr, text",
    [
        (19.04, 0.41, "19.0 ± 0.4"), (19.04, 0.12, "19.04 ± 0.12"), (103.2, 2.6, "103 ± 3"),
        (0.993, 0.0194, "0.993 ± 0.019"),
        (61234.0, 2100.0, "(6.1 ± 0.2)·10⁴"), (4.8e-7, 1e-8, "(4.80 ± 0.10)·10⁻⁷"), (7.0, math.nan, "7.00"),
        (714.2, math.nan, "714"), (9.996e-7, math.nan, "1.00·10⁻⁶"), (9999.6, math.nan, "1.00·10⁴"),
        (0.0, math.nan, "0.00"),
        (math.inf, math.nan, "∞"), (math.nan, math.nan, "0/0"), (5.0, 0.0, "5.00"), (3.0, 0.0999, "3.00 ± 0.10"),
        (200.0, 1234.0, "200 ± 1234"), (0.0005, 0.03, "0.00 ± 0.03"), (-0.0005, 0.03, "-0.00 ± 0.03"), (3e-6, 2e-4, "(0 ± 2)·10⁻⁴"),
        (5.0, 3e5, "(0 ± 3)·10⁵"), (-19.04, 0.41, "-19.0 ± 0.4"),
    ],
)  # fmt: skip
def test_numbers_as_one_reads_them(value, stderr, text):
    assert plot._number(value, stderr) == text


# --- the position axis ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 10, 64, 100, 2048, 131072])
def test_ticks_stand_at_the_token_they_name(length):
    x, labels = plot.position_ticks(length, em=0.25)
    assert sorted(x) == list(x) and len(set(labels)) == len(labels)
    for place, label in zip(x, labels):
        token = length if label == "L" else length - int(label[2:]) if label.startswith("L−") else int(label)
        assert place == pytest.approx((token - 0.5) / length, rel=1e-15)
    assert labels[0] == "1" and (labels[-1] == "L" or length == 1)


def test_ticks_thin_out_from_the_ends():
    many = "1 2 5 10 20 50 100 200 500 1024 L−500 L−200 L−100 L−50 L−20 L−10 L−5 L−2 L−1 L"
    assert plot.position_ticks(2048, em=0.15)[1] == many.split()
    few = plot.position_ticks(2048, em=1.2)[1]
    assert few[0] == "1" and few[-1] == "L" and "1024" in few and len(few) < 8


# --- small multiples --------------------------------------------------------------------------------------------------


def grid_cells(residuals=(0.0, 1.0), layers=(1, 6, 24), length=64):
    return [
        plot.Cell(f"cell {r} {c}", u_profile(length, seed), 0.1 * u_profile(length), u_profile(length, seed + 50), dict(residual=r, layers=c))  # fmt: skip
        for seed, (r, c) in enumerate(itertools.product(residuals, layers))
    ]


def test_grid_panels_are_the_cells_in_order():
    cells = grid_cells((0.0, 0.5, 1.0, 2.0), (1, 2, 4, 6, 12, 24))
    fig = plot.grid_figure(cells, title="Grid", caption=COMMAND)
    assert len(fig.axes) == 24
    for ax, cell in zip(fig.axes, cells):
        np.testing.assert_array_equal(line(ax, "measured ± 1 standard error").get_ydata(), cell.measured_L)
        np.testing.assert_array_equal(line(ax, "predicted").get_ydata(), cell.predicted_L)
        assert cell.label in [text.get_text() for text in ax.texts]
        assert {tuple(v) for v in band(ax)} >= set(zip(plot.positions(64), cell.measured_L + cell.stderr_L))
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in fig.axes}) == 1
    assert legend(fig) == ["measured ± 1 standard error", "predicted"]
    assert {"Grid", "token, of L = 64 (logit axis: both ends magnified)"} <= set(words(fig))
    check_words(fig)


def test_grid_names_each_prediction_by_what_it_is():
    """In one colour in every panel."""
    names = ("theory", "operator", "theory")
    fig = plot.grid_figure([plot.Cell(str(i), u_profile(16), None, u_profile(16, 1), prediction=name) for i, name in enumerate(names)])
    assert legend(fig) == ["measured", "theory", "operator"]
    assert [line(ax, name).get_color() for ax, name in zip(fig.axes, names)] == [plot.PREDICTED[0], plot.PREDICTED[1], plot.PREDICTED[0]]


def test_many_columns_make_a_wide_figure():
    cells = [plot.Cell(f"layers={n}", [8.0, 2.0, 6.0], coordinates=dict(layers=str(n))) for n in range(60)]
    for cols in (None, "layers"):
        fig = plot.grid_figure(cells, cols=cols)
        fig.canvas = FigureCanvasAgg(fig)
        assert all(ax.get_position().width * fig.get_figwidth() > 0.3 for ax in fig.axes)


def test_grid_says_shape_and_ratios_of_each_panel():
    fig = plot.grid_figure([plot.Cell("a", [8.0, 2.0, 6.0]), plot.Cell("b", [1.0, 1.0, 1.0])])
    assert "U · first 4.0 · last 3.0" in words(fig) and "flat · first 1.0 · last 1.0" in words(fig)
    summary = profile.summarize([8.0, 2.0, 6.0], dict(primacy=2.9))  # 4 ± 2.9 is not told from 1
    fig = plot.grid_figure([plot.Cell("a", [8.0, 2.0, 6.0], summary=summary)])
    assert "recency · first 4.0 · last 3.0" in words(fig)


@pytest.mark.parametrize("rows, cols, shape", [("residual", "layers", (2, 3)), ("layers", "residual", (3, 2)),
                                               ("residual", None, (2, 3)), (None, "residual", (3, 2))])  # fmt: skip
def test_grid_arranged_by_axis_values(rows, cols, shape):
    cells = grid_cells()
    shuffled = [cells[number] for number in (4, 2, 0, 5, 1, 3)]
    fig = plot.grid_figure(shuffled, rows=rows, cols=cols)
    axes = np.reshape(fig.axes, shape)
    values = {axis: list(dict.fromkeys(cell.coordinates[axis] for cell in shuffled)) for axis in ("residual", "layers")}
    for (row, col), ax in np.ndenumerate(axes):
        drawn_L = line(ax, "measured ± 1 standard error").get_ydata()
        (cell,) = [cell for cell in cells if np.array_equal(cell.measured_L, drawn_L)]
        assert rows is None or cell.coordinates[rows] == values[rows][row]
        assert cols is None or cell.coordinates[cols] == values[cols][col]
    for name in (f"{cols} = {value}" for value in values.get(cols, ())):
        assert name in words(fig)
    for name in (f"{rows}\n{value}" for value in values.get(rows, ())):
        assert name in words(fig)
    check_words(fig)


@pytest.mark.filterwarnings("error")
def test_grid_with_holes_zeros_and_cells_without_result():
    delta_L = np.zeros(32)
    delta_L[-1] = 1.0
    cells = [
        plot.Cell("full", u_profile(32), coordinates=dict(a=0, b=0)),
        plot.Cell("delta", delta_L, coordinates=dict(a=0, b=1)),
        plot.Cell("pending", None, coordinates=dict(a=1, b=0)),
    ]
    fig = plot.grid_figure(cells, rows="a", cols="b")
    assert [ax.axison for ax in fig.axes] == [True, True, True, False]
    assert "no result" in words(fig) and not fig.axes[2].lines
    assert [bool(marks_below(ax)) for ax in fig.axes[:2]] == [False, True]
    assert plot.OFF_AXIS in legend(fig)
    # The column with a hole at its end has its ticks labelled one panel higher.
    assert [ax.xaxis.get_tick_params()["labelbottom"] for ax in fig.axes[:3]] == [False, True, True]
    check_words(fig)
    check_words(plot.grid_figure([plot.Cell("pending", None)]))
    check_words(plot.grid_figure(cells, share_y=False))


def test_long_names_of_panels_are_wrapped():
    cells = [plot.Cell(f"window {w}, prefix {p}, alibi on, residual 0.25", u_profile(32), None, None, {}) for w in (16, 32) for p in (0, 8)]
    check_words(plot.grid_figure(cells))


def test_grid_axes_shared_or_not():
    cells = [plot.Cell("low", u_profile(32) / 1e3), plot.Cell("high", u_profile(32))]
    low, high = plot.grid_figure(cells).axes
    assert low.get_ylim() == high.get_ylim() and not high.yaxis.get_tick_params()["labelleft"]
    low, high = plot.grid_figure(cells, share_y=False).axes
    assert low.get_ylim()[1] < high.get_ylim()[1] and high.yaxis.get_tick_params()["labelleft"]


def test_grid_of_several_lengths_ticks_each_panel():
    cells = [plot.Cell(f"L = {n}", u_profile(n), None, u_profile(n, 1), dict(length=n)) for n in (16, 64, 256, 1024)]
    for arranged in (dict(rows="length"), dict(cols="length")):
        fig = plot.grid_figure(cells, **arranged)
        check_words(fig)
        for ax, n in zip(fig.axes, (16, 64, 256, 1024)):
            assert ax.xaxis.get_tick_params()["labelbottom"]
            assert str(n // 2) in [label.get_text() for label in ax.get_xticklabels()]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, magic", [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("A.PNG", b"\x89PNG")])
def test_save_by_suffix_in_a_new_folder(tmp_path, name, magic):
    path = tmp_path / "new" / "folder" / name
    assert plot.save(plot.influence_figure(u_profile(64), title="t"), path) == path
    assert path.read_bytes().startswith(magic)
    assert [p.name for p in path.parent.iterdir()] == [name]


def test_a_reader_keeps_the_whole_old_file(tmp_path):
    path = plot.save(plot.influence_figure(u_profile(16)), tmp_path / "a.png")
    before = path.read_bytes()
    with open(path, "rb") as reader:
        plot.save(plot.influence_figure(u_profile(16), title="new"), path)
        assert reader.read() == before != path.read_bytes()


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_figure_is_the_same_file(tmp_path, kind):
    first, second = (plot.save(plot.influence_figure(u_profile(64)), tmp_path / f"{n}.{kind}") for n in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_vector_fonts_are_embedded_or_outlines(tmp_path):
    fig = plot.influence_figure(u_profile(64), title="Title", caption=COMMAND)
    pdf = plot.save(fig, tmp_path / "a.pdf").read_bytes()
    assert b"/Type3" not in pdf and b"/CIDFontType2" in pdf
    assert b"<text" not in plot.save(fig, tmp_path / "a.svg").read_bytes()


def test_a_failed_save_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "a.png"
    plot.save(plot.influence_figure(u_profile(16)), path)
    before = path.read_bytes()

    class Breaking(Figure):
        def savefig(self, target, **_):
            with open(target, "wb") as file:
                file.write(b"half a fi")
            assert path.read_bytes() == before  # nothing is written in place
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        plot.save(Breaking(), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_no_global_state():
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        before = dict(matplotlib.rcParams)
        plot.grid_figure(grid_cells()), plot.influence_figure(u_profile(16))
        assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == []


def test_inputs_are_left_alone():
    measured_L, stderr_L, predicted_L = u_profile(32), np.full(32, 5.0), np.zeros(32)
    copies = [array.copy() for array in (measured_L, stderr_L, predicted_L)]
    plot.influence_figure(measured_L, stderr_L=stderr_L, curves={"p": (predicted_L, 0.1)})
    plot.grid_figure([plot.Cell("a", measured_L, stderr_L, predicted_L)])
    for array, copy in zip((measured_L, stderr_L, predicted_L), copies):
        np.testing.assert_array_equal(array, copy)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: plot.influence_figure([1.0, math.nan]), r"measured\[1\]=nan: influence must be finite"),
        (lambda: plot.influence_figure([1.0, -1.0]), r"measured\[1\]=-1.0"),
        (lambda: plot.influence_figure([]), r"measured has shape \(0,\)"),
        (lambda: plot.influence_figure([1.0, 2.0], curves={"c": [1.0, math.nan]}), r"curve 'c'\[1\]=nan"),
        (lambda: plot.influence_figure([1.0, 2.0], curves={"c": [1.0]}), r"curve 'c' has 1 positions: measured has 2"),
        (lambda: plot.influence_figure([1.0, 2.0], curves={"c": ([1.0, 1.0], -0.1)}), r"band of 'c': must be finite"),
        (lambda: plot.influence_figure([1.0, 2.0], stderr_L=[1.0]), r"stderr has shape \(1,\): measured has \(2,\)"),
        (lambda: plot.influence_figure([1.0, 2.0], stderr_L=[1.0, -1.0]), r"stderr: must be finite and not negative"),
        (lambda: plot.influence_figure([1.0, 2.0], stderr_L=[1.0, math.inf]), r"stderr: must be finite"),
        (lambda: plot.influence_figure([1.0, 2.0], summary=profile.summarize([1.0, 3.0])), r"summary: is of another"),
        (lambda: plot.grid_figure([]), r"cells: must hold at least one cell"),
        (lambda: plot.grid_figure([plot.Cell("a", [math.nan])]), r"measured of 'a'\[0\]=nan"),
        (lambda: plot.grid_figure([plot.Cell("a", [1.0], [-1.0])]), r"stderr of 'a': must be finite"),
        (lambda: plot.grid_figure([plot.Cell("a", [1.0], None, [1.0, 2.0])]), r"curve 'a' has 2 positions"),
        (lambda: plot.grid_figure([plot.Cell("a", [1.0], summary=profile.summarize([2.0]))]), r"summary of 'a': is of"),
        (lambda: plot.grid_figure([plot.Cell("a", [1.0])], rows="rope"), r"cell 'a' has no coordinate 'rope'"),
        (lambda: plot.grid_figure([plot.Cell(n, [1.0], coordinates=dict(r=0, c=0)) for n in "ab"], rows="r", cols="c"),
         r"cells 'a' and 'b' have the same r and c"),
        (lambda: plot.save(plot.influence_figure([1.0]), "a.jpg"), r"path='a.jpg': its suffix must be one of"),
    ],
)  # fmt: skip
def test_refusals_name_argument_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bundle_draws_every_profile_and_its_prediction_in_one_colour():
    profiles = {"2": (np.array([3.0, 1.0, 2.0]), np.array([3.0, 1.5, 2.0])), "6": (np.array([5.0, 1.0, 1.0, 4.0]), None)}
    figure = plot.bundle_figure(profiles, axis="layers", caption="python -m x")
    measured, predicted, other = figure.axes[0].lines[:3]
    np.testing.assert_array_equal(measured.get_ydata(), [3, 1, 2])
    np.testing.assert_array_equal(predicted.get_ydata(), [3, 1.5, 2])
    np.testing.assert_array_equal(other.get_ydata(), [5, 1, 1, 4])
    assert tuple(measured.get_color()) == tuple(predicted.get_color()) != tuple(other.get_color())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["layers = 2", "layers = 6", "predicted"]
    with pytest.raises(ValueError, match="curve '2' has 2 positions: measured has 3"):
        plot.bundle_figure({"2": (np.ones(3), np.ones(2))}, axis="layers")


@pytest.mark.parametrize("lengths", [(64, 256), (3, 2048), (2, 5)])
def test_a_bundle_of_several_lengths_is_over_fractions_of_the_text(lengths):
    fig = plot.bundle_figure({n: (u_profile(n), u_profile(n, 1)) for n in lengths}, axis="length", predicted="kernel theory")
    check_words(fig)
    (ax,) = fig.axes
    shown = {label.get_text(): place for label, place in zip(ax.get_xticklabels(), ax.get_xticks())}
    assert "0.5" in shown and "0.1" in shown and all(float(text) == pytest.approx(place, abs=1e-12) for text, place in shown.items())
    assert "place in the text, as a fraction (logit axis: both ends magnified)" in words(fig) and "kernel theory" in legend(fig)
    left, right = ax.get_xlim()
    assert left < min(shown.values()) and max(shown.values()) < right
    one = plot.bundle_figure({n: (u_profile(64, n), None) for n in (1, 2)}, axis="layers")
    assert "token, of L = 64 (logit axis: both ends magnified)" in words(one)


def test_a_bundle_marks_what_is_below_its_axis():
    deep_L = np.where(np.arange(64) < 60, 1e-30, 1.0)
    fig = plot.bundle_figure({"a": (u_profile(64), deep_L), "b": (deep_L, None)}, axis="residual")
    colors = [tuple(line(fig.axes[0], f"residual = {name}").get_color()) for name in "ab"]
    assert [tuple(row.get_markeredgecolor()) for row in marks_below(fig.axes[0])] == colors
    assert legend(fig)[-1] == plot.OFF_AXIS
    assert not marks_below(plot.bundle_figure({"a": (u_profile(64), None)}, axis="residual").axes[0])


def test_lines_that_are_zero_everywhere_say_so():
    on = lambda y_X: words(plot.lines_figure(np.arange(3), {"a": (y_X, None)}, xlabel="x", ylabel="y", yscale="log"))  # noqa: E731
    assert "zero everywhere" in on(np.zeros(3)) and "zero everywhere" not in on(np.array([0, 0, 1.0]))


def test_heat_map_writes_each_number_in_its_field():
    panels = {"rope on": [[1.0, 20.0], [np.nan, np.inf]], "rope off": [[2.0, 3.0], [4.0, 5.0]]}
    figure = plot.heat_figure(panels, rows="layers", cols="residual", row_names=["2", "6"], col_names=["on", "off"], label="depth")
    fields = {(ax.get_title(loc="left"), *text.get_position()): text.get_text() for ax in figure.axes[:2] for text in ax.texts}
    assert fields["rope on", 1, 0] == "20" and fields["rope on", 0, 1] == "–" and fields["rope on", 1, 1] == "∞"
    assert fields["rope off", 0, 1] == "4.0" and figure.axes[0].images[0].norm.vmin == 1 and figure.axes[0].images[0].norm.vmax == 20
    with pytest.raises(ValueError, match="2 rows and 1 columns"):
        plot.heat_figure(panels, rows="layers", cols="residual", row_names=["2", "6"], col_names=["on"], label="depth")


def test_a_valleys_life_shows_each_row_over_its_mean():
    profiles_ML = np.stack([u_profile(40, seed) * scale for seed, scale in enumerate((1.0, 10.0, 0.1))])
    fig = plot.life_figure([0, 10, 100], profiles_ML, caption=COMMAND)
    ax, bar = fig.axes
    (mesh,) = ax.collections
    drawn_ML = mesh.get_array().reshape(3, 40)
    np.testing.assert_allclose(drawn_ML, profiles_ML / profiles_ML.mean(1, keepdims=True))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "10", "100"]
    borders = mesh.get_coordinates()[0, :, 0]
    assert len(borders) == 41 and np.all((borders[:-1] < plot.positions(40)) & (plot.positions(40) < borders[1:]))


def test_lines_with_bands_and_levels():
    x, y_X = np.arange(5), np.arange(5) + 1.0
    fig = plot.lines_figure(x, {"a": (y_X, np.full(5, 0.5)), "b": (y_X[::-1], None)}, xlabel="layer", ylabel="mass", levels={"even": 2.0})
    (ax,) = fig.axes
    np.testing.assert_array_equal(line(ax, "b").get_ydata(), y_X[::-1])
    (band,) = ax.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == 0.5 and heights.max() == 5.5
    assert line(ax, "even").get_ydata()[0] == 2.0 and (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "mass")
    with pytest.raises(ValueError, match="series: must hold at least one"):
        plot.lines_figure(x, {}, xlabel="", ylabel="")
