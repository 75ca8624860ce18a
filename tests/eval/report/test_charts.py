import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.text import Text

from eval.report.charts import draw, style
from eval.report.charts.label_placement import overlap, place_labels
from eval.report.charts.render import FORMATS, render_file, render_svg, render_swatch
from eval.report.charts.specs import (
    Baseline,
    Curve,
    Heatmap,
    LineChart,
    Marker,
    Point,
    ScatterPlot,
    Strip,
    StripPlot,
)
from eval.report.charts.svg import to_element, to_file

BASELINES = [Baseline("mean", "mean color", 12.0), Baseline("nearest", "nearest image", 12.1)]
POINTS = [
    Point(1, "fedavg under ig", Marker(0), 20.0, 80.0, (18.0, 22.5), (75.0, 85.0)),
    Point(2, "hyperfl under ig", Marker(1, hollow=True), 31.0, 71.0),
]
SCATTER = ScatterPlot(POINTS, BASELINES)
STRIPS = StripPlot([Strip(1, "fedavg under ig", Marker(0), [7.0, 7.5, 19.0], 11.2, (6.0, 16.0))], BASELINES)
LINES = LineChart(
    "accuracy (%)",
    [
        Curve("fedavg", 0, [(0.0, 10.0), (5.0, 55.0)], [(0.0, 9.0, 11.0), (5.0, 50.0, 57.0)]),
        Curve("hyperfl", 1, [(0.0, 12.0), (5.0, 61.0)]),
    ],
    BASELINES,
)
HEATMAP = Heatmap([[1.0, 0.7], [0.7, 1.0]], 0.6, 1.0)
ALL = {"scatter": SCATTER, "strips": STRIPS, "lines": LINES, "heatmap": HEATMAP}


def drawn(chart, width=style.WIDE, **options):
    with draw.chart_style():
        figure = draw.draw(chart, width, **options)
        figure.draw_without_rendering()
    return figure


def plotted(figure) -> set[tuple[float, float]]:
    """All points of all lines, in the units of the data."""
    return {
        (float(x), float(y))
        for line in figure.axes[0].get_lines()
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        if np.isfinite([x, y]).all()
    }


def test_a_scatter_plot_holds_every_point_interval_and_baseline():
    figure = drawn(SCATTER)
    found = plotted(figure)
    assert found >= {(20.0, 80.0), (31.0, 71.0), (18.0, 80.0), (22.5, 80.0), (20.0, 75.0), (20.0, 85.0)}
    assert {x for x, _ in found} >= {12.0, 12.1}
    assert {text.get_text() for text in figure.axes[0].texts} == {"1", "2"}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["mean color 12.0", "nearest image 12.1"]
    marks = {line.get_gid(): line for line in figure.axes[0].get_lines() if line.get_gid()}
    assert set(marks) == {"tooltip:1: fedavg under ig, 20.0 dB, 80.0 %", "tooltip:2: hyperfl under ig, 31.0 dB, 71.0 %"}
    hollow = [to_rgba(line.get_markerfacecolor()) == to_rgba(style.PAPER) for line in marks.values()]
    assert hollow == [False, True]


def test_a_strip_plot_holds_every_image_mean_and_interval():
    figure = drawn(STRIPS)
    assert plotted(figure) >= {(7.0, 0.0), (7.5, 0.0), (19.0, 0.0), (11.2, 0.0), (6.0, 0.0), (16.0, 0.0)}
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["1  fedavg under ig"]


def test_a_narrow_strip_plot_has_its_names_above_the_dots():
    figure = drawn(STRIPS, style.NARROW)
    assert [text.get_text() for text in figure.axes[0].texts] == ["1  fedavg under ig"]
    assert not figure.axes[0].get_yticklabels()


@pytest.mark.parametrize("count", [1, 2, draw.MAX_WHISKERS, 101])
def test_a_line_chart_holds_every_value_with_whiskers_or_a_band(count):
    points = [(float(i), 10.0 + i % 3) for i in range(count)]
    band = [(at, value - 1, value + 2) for at, value in points]
    figure = drawn(LineChart("accuracy (%)", [Curve("fedavg", 0, points, band)], BASELINES))
    found = plotted(figure)
    assert found >= set(points)
    ends = {(at, end) for at, *interval in band for end in interval}
    (axes,) = figure.axes
    if count > draw.MAX_WHISKERS:
        corners = {(float(x), float(y)) for x, y in axes.collections[0].get_paths()[0].vertices}
        assert corners >= ends
    else:
        assert found >= ends
        assert not axes.collections
    (line,) = [line for line in axes.get_lines() if line.get_gid() == "tooltip:fedavg"]
    assert len(line.get_markevery()) == min(count, 7)
    assert {0, count - 1} <= set(line.get_markevery())


def test_series_differ_without_color():
    looks = {(style.marker(i), style.dashes(i)) for i in range(6)}
    assert len(looks) == len({style.marker(i) for i in range(6)}) == len({style.dashes(i) for i in range(6)}) == 6
    assert len({re.search(r' d="([^"]+)"', render_swatch(Marker(i)))[1] for i in range(6)}) == 6
    assert len(set(style.SERIES)) == len(set(style.SERIES_DARK)) == 8
    assert len(style.SHAPES) == len(style.MARKERS)


def test_a_heatmap_shades_every_value():
    shades = np.asarray(drawn(HEATMAP).axes[0].collections[0].get_facecolors()).reshape(-1, 4)
    assert shades[:, 3] == pytest.approx([1.0, 0.25, 0.25, 1.0])
    same = drawn(Heatmap([[1.0, 1.0]] * 2, 1.0, 1.0)).axes[0].collections[0].get_facecolors()
    assert (same[:, 3] == 1).all()


def test_values_below_zero_have_a_true_minus_sign():
    figure = drawn(LineChart("alignment", [Curve("a", 0, [(0.0, -5.0), (1.0, 5.0)])]))
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert any(label.startswith("\N{MINUS SIGN}") for label in labels)
    assert not any("-" in label for label in labels)


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0], [-3.0, 99.0]])
def test_ranges_hold_their_values(values):
    low, high = draw.padded_range(values, least=4)
    assert low <= min(values) <= max(values) <= high
    assert high - low >= 4
    low, high = draw.padded_range(values, least=4, low=0)
    assert low >= 0
    assert high > low


@pytest.mark.parametrize(("count", "spread"), [(6, 20), (12, 100), (20, 120), (20, 300)])
def test_labels_cover_neither_each_other_nor_marks(count, spread):
    draws = np.random.default_rng(count + spread)
    points = [(float(x), float(y)) for x, y in 150 + draws.uniform(-spread / 2, spread / 2, (count, 2))]
    sizes = [(8.0 * len(str(i + 1)) + 3, 13.0) for i in range(count)]
    marks = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    placed = place_labels(points, sizes, marks=marks, lines=[], inside=(0.0, 0.0, 300.0, 300.0))
    boxes = [label.box for label in placed]
    assert all(overlap(a, b) == 0 for i, a in enumerate(boxes) for b in boxes[:i])
    area = sum(overlap(box, mark) for box in boxes for mark in marks) / (count * 8 * 13)
    assert area < 0.05
    for (left, bottom, right, top), point, label in zip(boxes, points, placed, strict=True):
        assert 0 <= left < right <= 300
        assert 0 <= bottom < top <= 300
        near = (min(max(point[0], left), right), min(max(point[1], bottom), top))
        assert (label.leader is None) == (np.hypot(near[0] - point[0], near[1] - point[1]) <= 14)


@pytest.mark.parametrize("chart", ALL.values(), ids=ALL)
@pytest.mark.parametrize("width", [style.WIDE, style.NARROW])
def test_everything_drawn_lies_inside_the_picture(chart, width):
    figure = drawn(chart, width)
    box = figure.get_tightbbox()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 * 72 <= width
    assert box.y1 <= figure.get_figheight()


@pytest.mark.parametrize("width", [style.WIDE, style.NARROW])
def test_long_names_are_wrapped(width):
    name = "hyperfl-with-a-long-label@lr=0.01 with noise@std=0.1 under peel+ig@tv_weight=0.001, round 1000"
    strips = [Strip(i, name, Marker(0), [7.0, 9.0], 8.0, (6.0, 10.0)) for i in range(1, 4)]
    lines = LineChart(name, [Curve(name, 0, [(0.0, 1.0), (1.0, 2.0)])])
    scatter = ScatterPlot([Point(1, name, Marker(0), 7.0, 50.0)])
    for chart in (StripPlot(strips), lines, scatter):
        figure = drawn(chart, width, with_key=True)
        assert figure.axes[0].get_window_extent().height > 80
        boxes = [text.get_window_extent() for text in figure.findobj(Text) if len(text.get_text()) > 3]
        assert max(box.x1 for box in boxes) <= width
        assert min(box.x0 for box in boxes) >= 0
        words = " ".join(text.get_text().replace("\n", " ") for text in figure.findobj(Text))
        assert name in words


@pytest.mark.parametrize("chart", ALL.values(), ids=ALL)
def test_the_same_chart_gives_the_same_bytes(chart):
    assert render_svg(chart, style.WIDE) == render_svg(chart, style.WIDE)
    for kind in FORMATS:
        once, again = (render_file(chart, kind, style.NARROW, alt="A") for _ in range(2))
        assert once == again


def test_files_are_of_their_format_and_explain_their_marks():
    assert render_file(SCATTER, "pdf", style.NARROW, alt="A").startswith(b"%PDF-")
    assert render_file(SCATTER, "png", style.NARROW, alt="A").startswith(b"\x89PNG\r\n")
    words = "".join(ElementTree.fromstring(render_file(SCATTER, "svg", style.WIDE, alt="A")).itertext())
    assert "1  fedavg under ig" in words
    words = "".join(ElementTree.fromstring(render_file(LINES, "svg", style.WIDE, alt="A")).itertext())
    assert "hyperfl" in words
    with pytest.raises(ValueError, match="no figures as 'gif'; choose from pdf, png, svg"):
        render_file(SCATTER, "gif", style.WIDE, alt="A")


def test_elements_of_a_page_follow_its_colors_and_describe_themselves():
    element = to_element(render_svg(SCATTER, style.WIDE), name="tradeoff-wide", alt='A "chart"')
    root = ElementTree.fromstring(element)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == 'A "chart"'
    assert (root.attrib["width"], root.attrib["class"]) == ("680", "chart")
    assert not re.search(r"#[0-9a-f]{6}\b", element)
    assert {"--paper", "--ink", "--muted", "--rule", "--c0", "--c1"} <= set(re.findall(r"var\((--\w+)\)", element))
    titles = [title.text for title in root.iter("title")]
    assert titles == ["1: fedavg under ig, 20.0 dB, 80.0 %", "2: hyperfl under ig, 31.0 dB, 71.0 %"]
    ids = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
    assert ids
    assert all(one.startswith("tradeoff-wide-") for one in ids)
    assert {e.attrib["href"] for e in root.iter() if "href" in e.attrib} <= {f"#{one}" for one in ids}
    words = [text.text for text in root.iter("text")]
    assert {"accuracy (%)", "PSNR of the reconstructions (dB)", "mean color 12.0", "1", "2"} <= set(words)


def test_files_stand_alone():
    file = to_file(render_svg(LINES, style.WIDE), alt="A").decode()
    root = ElementTree.fromstring(file)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in file
    assert "url(" not in file
    assert style.SERIES[0] in file
    links = [e.attrib["{http://www.w3.org/1999/xlink}href"] for e in root.iter() if e.tag.endswith("}use")]
    ids = {e.attrib["id"] for e in root.iter() if "id" in e.attrib}
    assert links
    assert {link.removeprefix("#") for link in links} <= ids


def test_words_from_files_are_shown_as_they_are():
    nasty = "<b>$x^2$ & \x1b[1m 'id=\"x\"'"
    chart = LineChart(nasty, [Curve(nasty, 0, [(0.0, 1.0), (1.0, 2.0)])])
    root = ElementTree.fromstring(render_file(chart, "svg", style.WIDE, alt=nasty))
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("<b>$x^2$ & \\x1b[1m 'id=\"x\"'") == 2
    assert root.attrib["aria-label"] == words[words.index("<b>$x^2$ & \\x1b[1m 'id=\"x\"'")]
    assert not list(root.iter("{http://www.w3.org/2000/svg}b"))


def test_settings_of_the_user_change_nothing(monkeypatch):
    import matplotlib

    usual = render_svg(LINES, style.WIDE)
    monkeypatch.setitem(matplotlib.rcParams, "lines.linewidth", 9.0)
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "red")
    before = dict(matplotlib.rcParams)
    assert render_svg(LINES, style.WIDE) == usual
    assert dict(matplotlib.rcParams) == before


def test_accuracies_beyond_100_percent_are_not_drawn():
    chart = ScatterPlot([Point(1, "fedavg under ig", Marker(0), 20.0, 60.0, None, (-20.0, 108.0))])
    assert {y for _, y in plotted(drawn(chart))} == {0.0, 60.0, 100.0}
