"""matplotlib's SVG, made fit for pages: colors that follow the page, tooltips, a description, no ids that clash."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from eval.io.sanitize import escape_controls
from eval.report.charts import style

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_FONTS = "system-ui, 'Liberation Sans', Arial, sans-serif"
_MEASURED_FONT = "'DejaVu Sans'"
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_COORDINATES = {"d", "x", "y", "transform", "points"}
_HALO = f"text{{paint-order:stroke;stroke:{style.PAPER};stroke-width:3px}}"
"""Text that crosses lines stays legible; a page says the same of its charts."""


def to_element(drawn: str, *, name: str, alt: str) -> str:
    """Return an SVG element for a page whose CSS variables give the colors (`style.CSS_NAMES`).

    Args:
        drawn: SVG as matplotlib writes it.
        name: unique on the page; ids begin with it.
        alt: what the chart shows, for those who can't see it; empty where that stands beside it.
    """
    root = _cleaned(drawn, name)
    for element in root.iter():
        if "style" in element.attrib:
            look = element.attrib["style"].replace(_MEASURED_FONT, "var(--sans)")
            for color, variable in style.CSS_NAMES.items():
                look = look.replace(color, f"var({variable})")
            element.attrib["style"] = look
    root.attrib["class"] = "chart"
    _describe(root, alt)
    return ElementTree.tostring(root, encoding="unicode")


def to_file(drawn: str, *, alt: str) -> bytes:
    """Return an SVG file that stands alone, on white. Arguments as those of `to_element`."""
    root = _cleaned(drawn, "c")
    root.attrib |= {"xmlns": _SVG, "xmlns:xlink": _XLINK}
    for element in root.iter():
        if "style" in element.attrib:
            element.attrib["style"] = element.attrib["style"].replace(_MEASURED_FONT, _FONTS)
        if "href" in element.attrib:
            element.attrib["xlink:href"] = element.attrib.pop("href")
    rules = ElementTree.Element("style")
    rules.text = f"*{{stroke-linejoin:round;stroke-linecap:butt}}{_HALO}"
    root.insert(0, rules)
    _describe(root, alt)
    return (ElementTree.tostring(root, encoding="unicode") + "\n").encode()


def _describe(root: ElementTree.Element, alt: str) -> None:
    if alt:
        root.attrib |= {"role": "img", "aria-label": escape_controls(alt)}
    else:
        root.attrib["aria-hidden"] = "true"


def _cleaned(drawn: str, name: str) -> ElementTree.Element:
    """Return the drawing without namespaces, metadata and matplotlib's own ids, with tooltips and short numbers."""
    root = ElementTree.fromstring(drawn)
    parents = {child: parent for parent in root.iter() for child in parent}
    for element in list(root.iter()):
        element.tag = element.tag.partition("}")[2]
        if element.tag in {"metadata", "style", "clipPath"}:  # nothing lies outside the axes
            parents[element].remove(element)
            continue
        _clean_attributes(element, name)
        if element.tag not in {"text", "tspan", "title"}:
            element.text = None
        element.tail = None
        own = element.attrib.pop("gid", "")
        if own.startswith(style.TOOLTIP):
            title = ElementTree.Element("title")
            title.text = own.removeprefix(style.TOOLTIP)
            element.insert(0, title)
    width, height = (size.removesuffix("pt") for size in (root.attrib["width"], root.attrib["height"]))
    root.attrib |= {"width": f"{float(width):g}", "height": f"{float(height):g}"}
    root.attrib.pop("version", None)
    return root


def _clean_attributes(element: ElementTree.Element, name: str) -> None:
    attributes = {}
    for key, value in element.attrib.items():
        if key == "id":
            key, value = _identifier(element, value, name)
        elif key.endswith("}href"):
            key, value = "href", f"#{name}-{value.removeprefix('#')}"
        elif key in _COORDINATES:
            value = _LONG_NUMBER.sub(_shortened, value)
        elif key == "clip-path":
            continue
        attributes[key] = " ".join(value.split())
    element.attrib = attributes


def _identifier(element: ElementTree.Element, value: str, name: str) -> tuple[str, str]:
    """Return the attribute to keep of an id: markers are referred to by theirs, tooltips lie in others."""
    return ("id", f"{name}-{value}") if element.tag == "path" else ("gid", value)


def _shortened(found: re.Match[str]) -> str:
    number = f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
    return "0" if number == "-0" else number
