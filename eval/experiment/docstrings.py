"""What the docstrings of registered classes say: a summary, the papers, what each setting means."""

from __future__ import annotations

import inspect
import re

_CITED = re.compile(r"\(([^()]*\b(?:19|20)\d\d\b[^()]*)\)")
_PLACE = re.compile(
    r",\s+(?:\"[^\"]*\"|Eq\.|Eqs\.|Algorithms?|Alg\.|Tables?|Figures?|sections?|appendix)[^;]*", flags=re.IGNORECASE
)


def summarize(described: object) -> str:
    """Return what a registered class does: in plain words where it has them, else its docstring's first line."""
    if words := plain_words(described):
        return words.rstrip(".")
    return (inspect.getdoc(described) or "").partition("\n")[0].rstrip(".")


def plain_words(described: object) -> str:
    """Return the plain words that a registered class has itself; those of a base say nothing of a subclass."""
    return str(getattr(described, "__dict__", {}).get("plain", ""))


def citations(described: type) -> list[str]:
    """Return the papers named in a class's docstring, in parentheses with a year; else those of its base."""
    for kind in described.__mro__:
        found = _CITED.findall(" ".join((kind.__doc__ or "").split()))
        papers = [paper.strip() for group in found for paper in _PLACE.sub("", group).split(";")]
        if papers := [paper for paper in papers if re.search(r"\b(?:19|20)\d\d\b", paper)]:
            return list(dict.fromkeys(papers))
    return []


def meanings(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of each attribute."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        _, _, section = text.partition("Attributes:\n")
        lines = re.split(r"\n(?=\S)", section)[0] if section else ""
        for entry in re.split(r"\n(?= {4}\S)", "\n" + lines):
            names, colon, words = entry.strip().partition(":")
            if colon:
                found |= {name.strip(): " ".join(words.split()) for name in names.split(",")}
    return found
