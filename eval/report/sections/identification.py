"""Which images were told from others of their class: by picture, by features, by the update."""

from __future__ import annotations

from eval.io.text import join_words
from eval.metrics.lineup import AMONG, BY_FEATURES, BY_PICTURE, BY_UPDATE
from eval.report.blocks import Block, DefinitionList, Omission, TableBlock
from eval.report.formatting import NO_VALUE, format_percent
from eval.report.result_groups import IdentificationRate, ResultGroup
from eval.report.sections.numbered_groups import NumberedGroups

READING = [
    (
        "Named",
        "Share of images told from up to 49 others of their class, [95 % interval by Clopper and Pearson]; an image "
        "attacked under several seeds counts once, under the first.",
    ),
    (
        "By picture, by features",
        "The reconstruction is closest to the true image: as pixels, or as what the attacked network, as far as the "
        "attacker knows it, gives its classifier.",
    ),
    (
        "By update",
        "What the client would have sent of the true image alone is closest to what it sent. That takes no "
        "reconstruction, so it is the same for every attack, and it says that the image can be recognized by who has "
        "it, not what it shows.",
    ),
]
_WAYS = {BY_FEATURES: "naming by features", BY_UPDATE: "naming by update"}


def blocks(numbered: NumberedGroups) -> list[Block]:
    """Return the shares, and why some are missing; nothing where no image had others of its class beside it."""
    told = {key: group for key, group in numbered.by_number.items() if any(AMONG in row for row in group.attacked_rows)}
    if not told:
        return []
    columns = [*numbered.columns(), ">by picture", ">by features", ">by chance", ">by update", ">by chance"]
    lines = []
    for key, group in told.items():
        picture, features, update = (group.identification_by(way) for way in (BY_PICTURE, BY_FEATURES, BY_UPDATE))
        cells = [
            format_rate(picture),
            format_rate(features),
            format_chance(picture),
            format_rate(update),
            format_chance(update),
        ]
        lines.append([*numbered.row(key, group), *cells])
    return [
        TableBlock("Images named among others of their class", columns, lines),
        DefinitionList(READING),
        *_missing(told),
    ]


def format_rate(named: IdentificationRate | None) -> str:
    """Return share and interval."""
    if named is None:
        return NO_VALUE
    low, high = named.interval
    return f"{format_percent(named.hits / named.images)} [{100 * low:.0f}, {100 * high:.0f}]"


def format_chance(named: IdentificationRate | None) -> str:
    """Return how often a guess would name them."""
    return NO_VALUE if named is None else format_percent(named.chance)


def _missing(told: dict[int, ResultGroup]) -> list[Block]:
    """Return why images of some methods could not be named so."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for group in told.values():
        for row in group.attacked_rows:
            for way in _WAYS:
                if reason := row.get("missing", {}).get(way):
                    found.setdefault((way, reason), {})[f"{group.method} ({group.attack})"] = None
    return [Omission(f"{_WAYS[way]} under {join_words(list(who))}", reason) for (way, reason), who in found.items()]
