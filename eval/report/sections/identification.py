"""Which images were told from others of their class: by picture, by features, by the update."""

from __future__ import annotations

from eval.io.text import join
from eval.metrics.lineup import AMONG, BY_FEATURES, BY_PICTURE, BY_UPDATE
from eval.report.blocks import Absent, Block, Grid, Items
from eval.report.formatting import NONE, percent
from eval.report.result_groups import Group, Named
from eval.report.sections.overview import Numbered

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
        "reconstruction, so it is the same for every attack, and it says that the image can be recognised by who has "
        "it, not what it shows.",
    ),
]
_WAYS = {BY_FEATURES: "naming by features", BY_UPDATE: "naming by update"}


def blocks(numbered: Numbered) -> list[Block]:
    """The shares, and why some are missing; nothing where no image had others of its class beside it."""
    told = {key: group for key, group in numbered.numbers.items() if any(AMONG in row for row in group.scored)}
    if not told:
        return []
    columns = [*numbered.columns(), ">by picture", ">by features", ">by chance", ">by update", ">by chance"]
    lines = []
    for key, group in told.items():
        picture, features, update = (group.named_by(way) for way in (BY_PICTURE, BY_FEATURES, BY_UPDATE))
        cells = [rate(picture), rate(features), chance(picture), rate(update), chance(update)]
        lines.append([*numbered.row(key, group), *cells])
    return [Grid("Images named among others of their class", columns, lines), Items(READING), *_missing(told)]


def rate(named: Named | None) -> str:
    """Share and interval."""
    if named is None:
        return NONE
    low, high = named.interval
    return f"{percent(named.hits / named.images)} [{100 * low:.0f}, {100 * high:.0f}]"


def chance(named: Named | None) -> str:
    """How often a guess would name them."""
    return NONE if named is None else percent(named.chance)


def _missing(told: dict[int, Group]) -> list[Block]:
    """Why images of some methods could not be named so."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for group in told.values():
        for row in group.scored:
            for way in _WAYS:
                if reason := row.get("missing", {}).get(way):
                    found.setdefault((way, reason), {})[f"{group.method} ({group.attack})"] = None
    return [Absent(f"{_WAYS[way]} under {join(list(who))}", reason) for (way, reason), who in found.items()]
