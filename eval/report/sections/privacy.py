"""What differential privacy the methods claim, and whether anything found contradicts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from eval.io.text import join_words, to_sentence
from eval.metrics import statistics
from eval.metrics.lineup import AMONG, BY_PICTURE, BY_UPDATE
from eval.metrics.score import Row
from eval.privacy import epsilon_bounds as epsilon
from eval.privacy.claim_rows import BOUND, EPSILON, OF_UPDATE, statement_of_row
from eval.report.blocks import Block, DefinitionList, Note, Omission, Paragraph, Section, TableBlock
from eval.report.formatting import format_error, format_number, format_percent
from eval.report.load import PRIVACY, Run
from eval.report.result_groups import ResultGroup
from eval.report.sections.numbered_groups import NumberedGroups
from eval.report.settings import section as section_of

CONFIDENCE = 0.95
"""Confidence of everything together that a table compares with its bounds."""
TITLE = "Privacy: claims and bounds"
NOTHING = "none claimed"
ALARM = "Error: more was found than the differential privacy that is claimed allows"
AT_FAULT = (
    "If the claim were true this could hardly happen: noise, clipping, sampling or accounting is at fault, or images "
    "can be told apart by something other than updates. Trust no epsilon of these methods until that is found."
)
_WAYS = {BY_PICTURE: "", BY_UPDATE: " by the update itself"}
_PRIVATE = {"noise_multiplier", "clip", "delta"}
"""Settings that a method or a defense has which makes claims."""
_CHOICE = {f"observe.{key}" for key in ("clients", "rounds", "images", "classes", "seed")}
"""Settings by which the attacks of a run may differ that say which images are watched, and when."""
READING = [
    (
        "Epsilon, delta",
        "What is released changes the odds of any statement about one record (or client) by a factor of at most "
        "exp(epsilon), but for a probability of delta. By the PRV accountant, which is exact where every record is in "
        "every step; RDP is looser. A claim is that of the client with least of it, for the rounds it took part in.",
    ),
    (
        "Zero-out, steps",
        "A record that counts as nothing moves a noisy sum by the clip, as one more or less would; one in another's "
        "place moves it by twice that. Steps are those that a record can be in, at the rate given: at rate 1, where "
        "batches go round the images, one in every epoch, and nothing is gained from sampling.",
    ),
    (
        "Named",
        "Images that the reconstruction (picture), or the update itself, tells from others of their class; an image "
        "attacked under several seeds counts once, under the first. By update all attacks count together, under the "
        "number of the first: no attack changes it, but an update that all of them refuse is missing.",
    ),
    (
        "At most",
        "How often any attack whatever can name an image if the claim holds (reconstruction robustness; Balle et al., "
        "2022; Hayes et al., 2023), where all candidates are equally likely beforehand: from the observed update "
        "alone, and with all that the client sent in training before.",
    ),
    (
        "At least",
        "Lower ends of Clopper and Pearson's intervals, and what they prove of epsilon; all of a table hold together "
        "with 95 %. One above its bound refutes the claim and is shown at the top of this report. Far below it, it "
        "says little: another attack may do better.",
    ),
    ("Could be shown", "What the lower end of epsilon would be if every image, or every canary, had been told right."),
]
CANARIES = (
    "The clipping, noise and sampling that are claimed were run on canaries: records with the longest gradients there "
    "may be, or clients with the longest updates where clients are protected, each in or not by the toss of a coin, as "
    "many steps as the claim charges. Who reads every step and tells which were in shows that epsilon is at least so "
    "much (99 % sure for each; Nasr et al., 2023, for mechanisms with a Gaussian trade-off)."
)


@dataclass(frozen=True)
class BoundedIdentification:
    """How often an attack named images, and what bounds it.

    Attributes:
        hits: images named.
        trials: images.
        chance: mean of 1 / N over them.
        bound: most of them that any attack names, from all that it saw: mean over images.
        update: likewise, from the observed updates alone.
        epsilon: claimed of all that was seen.
        delta: for which.
    """

    hits: int
    trials: int
    chance: float
    bound: float
    update: float
    epsilon: float
    delta: float

    def at_least(self, significance: float) -> float:
        """Return the lower end of the rate."""
        return statistics.rate_lower_bound(self.hits, self.trials, significance)

    def epsilon_at_least(self, hits: int, significance: float) -> float:
        """Return lower end of epsilon if so many had been named."""
        return epsilon.epsilon_from_identification(
            hits, self.trials, self.chance, delta=self.delta, significance=significance
        )

    def refutes_claim(self, significance: float) -> bool:
        """Return whether a bound is violated."""
        return self.at_least(significance) > self.bound or self.epsilon_at_least(self.hits, significance) > self.epsilon


def bounded_identification(run: Run, group: ResultGroup, way: str = BY_PICTURE) -> BoundedIdentification | None:
    """Return what an attack, or the update, named under a claim; None without claim, image or bound.

    The bounds are on one guess for each image, so they say nothing where the closest of several stands for it; and
    images of one update are not independent of each other.

    Args:
        run: the run.
        group: the attack's results.
        way: column that says whether an image was named.
    """
    claims = [row for row in run.privacy if (row["method"], row["defense"]) == group.subject]
    once, several = group.first_rows(way), "images" if way == BY_UPDATE else "candidates"
    known = [row for row in once if row.get(BOUND) is not None]
    if not claims or not known or len(known) < len(once) or any(row.get(several, 1) > 1 for row in known):
        return None
    return BoundedIdentification(
        hits=sum(bool(row[way]) for row in known),
        trials=len(known),
        chance=fmean(1 / row[AMONG] for row in known),
        bound=fmean(row[BOUND] for row in known),
        update=fmean(row[OF_UPDATE] for row in known),
        epsilon=max(row[EPSILON] for row in known),
        delta=claims[0]["delta"],
    )


def alarms(numbered: NumberedGroups) -> list[Note]:
    """Return what no true claim allows, for the top of the report."""
    entries = []
    named = _named(numbered)
    for (key, way), found in named.items():
        level = _level(named)
        if found.refutes_claim(level):
            told = (
                f"{found.hits} of {found.trials} images were named among others of their class{_WAYS[way]}, so at "
                f"least {format_percent(found.at_least(level), 1)} can be; under the differential privacy that is "
                "claimed "
                f"nothing names more than {format_percent(found.bound, 1)}."
            )
            entries.append((numbered.label(numbered.by_number[key]), told))
    for subject, row in _audits(numbered.run).items():
        audit = row["audit"]
        if audit["lower"] > row["epsilon"]:
            told = (
                f"An audit of its own noisy steps with {audit['canaries']:,} canaries shows an epsilon of at least "
                f"{format_number(audit['lower'], 2)}; claimed is {format_number(row['epsilon'], 2)}."
            )
            entries.append((_subject_label(subject), told))
    return [Note(ALARM, [*entries, ("what that means", AT_FAULT)])] if entries else []


def claims_at_a_glance(run: Run) -> str:
    """Return what is claimed, at a glance."""
    claims = [(subject, row) for subject, row in _claims(run).items() if row["epsilon"] is not None]
    if not claims:
        return NOTHING if run.privacy or not _expects_claims(run) else ""
    words = [
        f"{_subject_label(subject)}: epsilon {format_number(row['epsilon'], 2)} at delta "
        f"{format_error(row['delta'])} per {row['unit']}"
        for subject, row in claims
    ]
    return "; ".join(words) if len(words) <= 3 else f"{len(words)} methods, see below"


def legend_notes(numbered: NumberedGroups) -> list[str]:
    """Return notes for a table's legend: errors first, then the claims in a sentence each."""
    errors = [f"{note.title}. {_joined(note.entries)}" for note in alarms(numbered)]
    return [*errors, *(f"Privacy of {name}: {words}" for name, words in _sentences(numbered.run))]


def _joined(entries: list[tuple[str, str]]) -> str:
    return " ".join(f"{name}: {words}" for name, words in entries)


def section(numbered: NumberedGroups) -> list[Section]:
    """Return claims, bounds and audits; nothing where no method claims anything."""
    run = numbered.run
    if not run.privacy:
        if not _expects_claims(run):
            return []
        why = f"there is no {PRIVACY}; start the run again in its folder, which computes nothing twice"
        return [Section("privacy", TITLE, [Omission("what the methods may claim", why)])]
    blocks = [_claimed(numbered), DefinitionList(_sentences(run)), *_without(run)]
    return [Section("privacy", TITLE, [*blocks, *_bounds(numbered), *_audited(numbered), DefinitionList(READING)])]


def _without(run: Run) -> list[Block]:
    """Return methods that claim nothing, and those whose claim is that no epsilon holds."""
    claims, blocks = _claims(run), list[Block]()
    silent = dict.fromkeys(_subject_label(group.subject) for group in run.groups if group.subject not in claims)
    if silent:
        blocks.append(Paragraph(f"No differential privacy is claimed for {join_words(list(silent))}."))
    if empty := [_subject_label(subject) for subject, row in claims.items() if row["epsilon"] is None]:
        words = "Without an epsilon nothing bounds how often images are named, nor is there anything to audit"
        blocks.append(Paragraph(f"{words}: {join_words(empty)}."))
    return blocks


def _expects_claims(run: Run) -> bool:
    """Return whether the settings of some method, or of some defense, are those of one that makes claims."""
    return any(map(_makes_claims, [*run.settings.methods.values(), *run.settings.defenses.values()]))


def _makes_claims(spec: Mapping[str, Any]) -> bool:
    parts = spec.get("parts")
    inner = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    return set(spec) >= _PRIVATE or any(map(_makes_claims, inner))


def _subject_label(subject: tuple[str, str]) -> str:
    method, defense = subject
    return method if defense == "none" else f"{method} with {defense}"


def _claims(run: Run) -> dict[tuple[str, str], Row]:
    """Return, for every method under every defense, the claim of the seed with the least privacy."""
    found: dict[tuple[str, str], Row] = {}
    for row in run.privacy:
        subject = (row["method"], row["defense"])
        best = found.get(subject)
        if best is None or (row["epsilon"] or 0.0) > (best["epsilon"] or 0.0):
            found[subject] = row
    return found


def _sentences(run: Run) -> list[tuple[str, str]]:
    return [
        (_subject_label(subject), to_sentence(statement_of_row(row).sentence()))
        for subject, row in _claims(run).items()
    ]


def _head(numbered: NumberedGroups, method: str, defense: str) -> list[str]:
    return [method, *([defense] if numbered.defended else [])]


def _claimed(numbered: NumberedGroups) -> TableBlock:
    columns = [*_head(numbered, "method", "defense"), ">epsilon", ">by RDP", ">delta", "protects", "mode"]
    columns += [">noise / clip", ">clip", ">rate", ">steps", ">rounds"]
    lines = []
    for (method, defense), row in _claims(numbered.run).items():
        charged = [f"{row['noise_multiplier']:.3g}", f"{row['clip']:.3g}", f"{row['rate']:.3g}"]
        epsilons = [
            format_number(row["epsilon"], 2) if row["epsilon"] is not None else "none",
            format_number(row["epsilon_rdp"], 2),
        ]
        said = [*epsilons, format_error(row["delta"]), f"a {row['unit']}, {row['adjacency']}", row["mode"]]
        lines.append([*_head(numbered, method, defense), *said, *charged, f"{row['steps']:,}", f"{row['rounds']:,}"])
    return TableBlock("What is claimed", columns, lines)


def _named(numbered: NumberedGroups) -> dict[tuple[int, str], BoundedIdentification]:
    """Return what attacks named, by number and way of telling; by update once, under the first attack."""
    found, pools = dict[tuple[int, str], BoundedIdentification](), _pooled(numbered)
    for key, group in numbered.by_number.items():
        if (told := bounded_identification(numbered.run, group)) is not None:
            found[key, BY_PICTURE] = told
        pool = pools.pop(_observation(numbered.run, group), None)
        if pool is not None and (told := bounded_identification(numbered.run, pool, BY_UPDATE)) is not None:
            found[key, BY_UPDATE] = told
    return found


def _pooled(numbered: NumberedGroups) -> dict[tuple[str, ...], ResultGroup]:
    """Return the rows of all attacks on updates of one kind: what an update tells depends on no attack.

    An attack may be on fewer images than another, or refuse some. An image's first row is one of its first seed.
    """
    lots: dict[tuple[str, ...], list[ResultGroup]] = {}
    for group in numbered.by_number.values():
        lots.setdefault(_observation(numbered.run, group), []).append(group)
    pools = {}
    for what, lot in lots.items():
        rows = sorted((row for group in lot for row in group.rows), key=lambda row: int(row["seed"]))
        pools[what] = replace(lot[0], rows=tuple(rows))
    return pools


def _observation(run: Run, group: ResultGroup) -> tuple[str, ...]:
    """Return whose updates an attack is on, and how they are made of an image, whatever the images."""
    own = section_of(run.settings.attacks.get(group.attack, {}), "with")
    made = {f"observe.{key}": value for key, value in run.settings.section("observe").items()} | {**own}
    how = sorted(f"{key}={value}" for key, value in made.items() if key not in _CHOICE)
    return (*group.subject, str(group.round), *how)


def _level(named: Mapping[tuple[int, str], BoundedIdentification]) -> float:
    """Return significance of each, so that all together are wrong with 5 % at most (Bonferroni)."""
    return (1 - CONFIDENCE) / max(1, len(named))


def _bounds(numbered: NumberedGroups) -> list[Block]:
    named = _named(numbered)
    level, lines = _level(named), []
    for (key, way), found in named.items():
        low, high = statistics.exact_interval(found.hits, found.trials)
        rate = f"{found.hits} of {found.trials} [{100 * low:.0f}, {100 * high:.0f}]\N{NO-BREAK SPACE}%"
        ends = [format_percent(share, 1) for share in (found.at_least(level), found.update, found.bound)]
        shown = [found.epsilon_at_least(found.hits, level), found.epsilon, found.epsilon_at_least(found.trials, level)]
        head = [*numbered.row(key, numbered.by_number[key]), "update" if way == BY_UPDATE else "picture"]
        row = [*head, rate, format_percent(found.chance, 1), *ends]
        lines.append(
            [*row, *(format_number(value, 2) for value in shown), "yes" if found.refutes_claim(level) else "no"]
        )
    columns = [*numbered.columns(), "by", ">named", ">by chance", ">at least", ">at most, update", ">at most, all seen"]
    columns += [">epsilon at least", ">epsilon of all seen", ">could be shown", "refuted"]
    blocks: list[Block] = [TableBlock("Images named, and what bounds it", columns, lines)] if lines else []
    return [*blocks, *_unbounded(numbered)]


def _unbounded(numbered: NumberedGroups) -> list[Block]:
    """Return why nothing bounds some methods' attacks."""
    reasons: dict[str, dict[str, None]] = {}
    claims = _claims(numbered.run)
    for group in numbered.by_number.values():
        if group.subject in claims and claims[group.subject]["epsilon"] is None:
            continue  # said once of all
        for image in group.image_rows:
            if reason := image.get("missing", {}).get(BOUND):
                reasons.setdefault(reason, {})[_subject_label(group.subject)] = None
    what = "a bound on how often images of {} are named"
    return [Omission(what.format(join_words(list(who))), why) for why, who in reasons.items()]


def _audits(run: Run) -> dict[tuple[str, str], Row]:
    """Return, for every method under every defense, the claim whose audit found most."""
    found: dict[tuple[str, str], Row] = {}
    for row in run.privacy:
        if row["audit"] is not None:
            subject = (row["method"], row["defense"])
            best = found.get(subject)
            if best is None or _over(row) > _over(best):
                found[subject] = row
    return found


def _over(row: Mapping[str, Any]) -> float:
    return float(row["audit"]["lower"] - row["epsilon"])


def _audited(numbered: NumberedGroups) -> list[Block]:
    run, lines = numbered.run, []
    for (method, defense), row in _audits(run).items():
        audit = row["audit"]
        figures = [format_number(value, 2) for value in (audit["lower"], row["epsilon"], audit["ceiling"])]
        told = "yes" if audit["lower"] > row["epsilon"] else "no"
        head = _head(numbered, method, defense)
        lines.append([*head, f"{audit['canaries']:,}", f"{audit['steps']:,}", *figures, told])
    columns = [*_head(numbered, "method", "defense"), ">canaries", ">steps", ">epsilon at least", ">claimed"]
    columns += [">could be shown", "refuted"]
    blocks: list[Block] = [TableBlock("The noisy steps, audited", columns, lines), Paragraph(CANARIES)] if lines else []
    missing = {
        _subject_label(subject): row["missing"]["audit"]
        for subject, row in _claims(run).items()
        if row["epsilon"] is not None and "audit" in row["missing"] and subject not in _audits(run)
    }
    return [*blocks, *(Omission(f"an audit of {name}", why) for name, why in missing.items())]
