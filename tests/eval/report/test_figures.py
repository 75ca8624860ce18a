import pytest

from eval.report import figures, svg
from eval.report.figures import Curve, Floor, Point, Strip
from eval.report.svg import Scale, around


def test_scales_and_ticks():
    scale = Scale(10.0, 30.0, 100.0, 300.0)
    assert scale(20.0) == 200.0
    assert scale.ticks(5) == [10.0, 15.0, 20.0, 25.0, 30.0]
    assert Scale(0.0, 0.003, 0, 1).ticks(4) == [0.0, 0.001, 0.002, 0.003]
    assert len(Scale(3.0, 97.0, 0, 1).ticks(5)) <= 5


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0], [-3.0, 99.0]])
def test_ranges_hold_their_values(values):
    low, high = around(values, least=4)
    assert low <= min(values) <= max(values) <= high
    assert high - low >= 4
    low, high = around(values, least=4, low=0)
    assert low >= 0
    assert high > low


def test_text_and_attributes_are_escaped():
    assert svg.text(1, 2.50, "<a> & b") == '<text x="1" y="2.5">&lt;a&gt; &amp; b</text>'
    assert (
        svg.tag("g", class_='"x"', stroke_width=2, aria_hidden=None) == '<g class="&quot;x&quot;" stroke-width="2"></g>'
    )


def test_series_differ_without_colour():
    looks = {(svg.SHAPES[i % len(svg.SHAPES)], svg.DASHES[i % len(svg.DASHES)]) for i in range(6)}
    assert len(looks) == 6
    assert len({svg.mark(0, 0, i).split(" ")[0] + svg.mark(0, 0, i).split('"')[1] for i in range(6)}) == 6
    assert "open" in svg.mark(0, 0, 0, hollow=True)


def test_scatter_shows_points_floors_and_intervals():
    points = [Point(1, 0, False, 20.0, 80.0, (18.0, 22.0), (75.0, 85.0)), Point(2, 1, True, 20.0, 80.0)]
    drawn = figures.scatter(
        points, [Floor("mean", "mean colour", 12.0), Floor("nearest", "nearest image", 12.1)], alt="A"
    )
    assert 'aria-label="A"' in drawn
    assert "mean colour 12.0" in drawn
    assert drawn.count('class="floor"') == 2
    assert drawn.count('class="bar c0"') == 6
    numbers = [
        part.split('"')[1:4:2] for part in drawn.split("<text x=")[1:] if part.endswith((">1</text>", ">2</text>"))
    ]
    assert len(set(map(tuple, numbers))) == len(numbers)


def test_strips_of_equal_values():
    drawn = figures.strips([Strip(1, "fedavg under ig", 0, False, [7.0, 7.0], 7.0)], [], alt="A")
    assert drawn.count('class="dot f0"') == 2
    assert "fedavg under ig" in drawn


@pytest.mark.parametrize("count", [1, 2, 101])
def test_lines_of_any_length(count):
    points = [(float(i), 10.0 + i % 3) for i in range(count)]
    curve = Curve(0, points, [(at, value - 1, value + 1) for at, value in points])
    drawn = figures.lines(
        [curve], ylabel="accuracy (%)", alt="A", floors=[Floor("mean", "mean colour", 9.0)], percent=True
    )
    assert ('class="band f0"' in drawn) is (count > figures.FEW)
    assert drawn.count("mark c0") == min(count, 7)
    assert "mean colour" in drawn


def test_lines_below_zero_are_shown():
    drawn = figures.lines([Curve(0, [(0.0, -5.0), (1.0, 5.0)], [])], ylabel="x", alt="A")
    assert "\N{MINUS SIGN}" in drawn
