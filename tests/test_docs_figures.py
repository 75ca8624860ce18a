"""No sentence of a page holds more than two figures: more belong into a table, or onto a page of results."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(TEXTS)]
"""Pages that people write, and those of benchmarks, which code writes."""
MOST = 2
NAMED = re.compile(
    r"\b(?:Tables?|Figures?|Eqs?\.|[Ss]ections?|Algorithm|Proposition|Prop\.|Appendix|Objective|footnote|"
    r"[Ss]eeds?|[Cc]lients?|[Rr]ounds?|Python|Opacus|YAML|torch|CIFAR|ResNet|SHAKE|Office|Apache|numbers|float|TF|uint|SHA|AlexNet)"
    r"[- ]?[\w.()-]*\d(?:[\w.]*\w)?(?:(?:, | and | to )\d(?:[\w.]*\w)?)*|\b8-bit|\b8 bits"
)
"""Figures that are names: Table 3, ResNet-18, Eq. 10, float32, seed 0, round 10."""
CITED = re.compile(
    r"\([^()]*\b(?:19|20)\d\d[^()]*\)|\b(?:19|20)\d\d-\d\d-\d\d\b|\b(?:January|November|December) 20\d\d\b"
)
NUMBER = re.compile(r"(?<![\w.^])[-+]?\.?\d[\d,.]*(?:e-?\d+)?(?:x\d+)*(?![\w^])")


def sentences(text: str) -> list[str]:
    """Sentences of a page's prose: without code, tables, headings, links' targets and figures that are names."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:\||#| {4}).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for pattern in (CITED, NAMED):
        text = pattern.sub("name", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    return [
        part for block in blocks for part in re.split(r"(?<=[.!?])[*)\"]* +(?=[\w*`\[(\"])", " ".join(block.split()))
    ]


def figures(sentence: str) -> list[str]:
    """Numbers that stand by themselves in a sentence, the mark of an enumerated item left out."""
    return NUMBER.findall(re.sub(r"^\d+\. ", "", sentence))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_holds_more_than_two_figures(page: Path) -> None:
    dense = [sentence for sentence in sentences(page.read_text()) if len(figures(sentence)) > MOST]
    assert not dense, "\n".join([f"{len(dense)} sentences:", *dense])


def test_figures_are_counted() -> None:
    assert figures("On Fashion-MNIST 21.5 dB [20.2, 22.8] came back of 28x28 pixels.") == [
        "21.5",
        "20.2,",
        "22.8",
        "28x28",
    ]
    (one,) = sentences("HyperFL (Guo et al., AAAI 2025), Table 3 and Eq. 10, has `lr: 0.1` in float32 on ResNet-18.")
    assert not figures(one)
    assert len(sentences("One has 1. Two has 2.\n\n- Three has 3\n- Four has 4")) == 4
