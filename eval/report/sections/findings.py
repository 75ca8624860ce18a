"""What leaked, in plain words: a verdict for every method under every defense, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eval.io.text import format_count, join_words
from eval.metrics import statistics
from eval.metrics.statistics import Interval
from eval.report.blocks import FindingBlock
from eval.report.formatting import format_error, format_interval, format_number, format_percent, format_percent_interval
from eval.report.result_groups import (
    BASELINES,
    CLEAR_MARGIN,
    MIN_IMAGES,
    RECOGNIZABLE_PSNR,
    PrivateTensorRecovery,
    ResultGroup,
    exceeds_baseline,
)

BASELINE_SENTENCES = {
    "mean": "every image's own mean color",
    "grey": "mid gray",
    "noise": "noise",
    "nearest": "the most similar image of other clients",
    "public": "the mean of the attack's public images",
}
PICTURES, IDENTITIES = "pictures", "identity of pictures"
"""What leaks of pictures: what they show, or no more than which of several they were."""
UNJUDGED = "not judged, as the true images are not known"
LEAKS, OPEN = "shown to leak", "not shown to leak beyond what was known before"


def subject_label(group: ResultGroup) -> str:
    """Return the method and its defense in words."""
    return group.method if group.defense == "none" else f"{group.method} with {group.defense}"


def groups_by_subject(groups: Sequence[ResultGroup]) -> dict[str, list[ResultGroup]]:
    """Return groups by method and defense, in order."""
    found: dict[str, list[ResultGroup]] = {}
    for group in groups:
        found.setdefault(subject_label(group), []).append(group)
    return found


def strongest_attack(groups: Sequence[ResultGroup]) -> ResultGroup | None:
    """Return the group with the largest lower end of gain over its best baseline; None without pictures.

    Where that end is not above 0, or of fewer than `MIN_IMAGES` images, it tells hardly anything: these groups rank by
    their means, behind all others.
    """

    def certain(group: ResultGroup) -> tuple[float, float]:
        assert group.gain is not None
        low = group.gain.low
        tells = low is not None and low > 0 and group.gain.images >= MIN_IMAGES
        return (low if tells and low is not None else -math.inf, group.gain.value)

    judged = [group for group in groups if group.gain is not None]
    return max(judged, key=certain) if judged else None


def findings(groups: Sequence[ResultGroup], *, labels_given: bool = False) -> list[FindingBlock]:
    """Return one finding for every method under every defense."""
    several = len({group.round for group in groups}) > 1
    return [_finding(name, own, several, labels_given) for name, own in groups_by_subject(groups).items()]


def _open(groups: Sequence[ResultGroup]) -> list[str]:
    """Return what attacks leave open of a subject."""
    from eval.report.sections.inconclusive import (  # which is written in words of this package
        find_open_questions,
        outcomes_of_rows,
    )

    return [
        f"Not decided: {one}."
        for one in find_open_questions([one for group in groups for one in outcomes_of_rows(group.attack, group.rows)])
    ]


def _finding(name: str, groups: Sequence[ResultGroup], several: bool, labels_given: bool) -> FindingBlock:
    if not any(group.attacked_rows for group in groups):
        reasons = list(dict.fromkeys(reason for group in groups for reason in group.refusals))
        return FindingBlock(name, "not examined", None, [f"No attack says anything about it: {join_words(reasons)}."])
    pictures, pictures_leak = _pictures(groups, several)
    labels, labels_leak = _labels(groups, labels_given)
    secrets, secrets_leak = _private_tensors(groups)
    leaks = [*([pictures_leak] if pictures_leak else [])]
    leaks += [what for what, leaked in (("labels", labels_leak), ("private values", secrets_leak)) if leaked]
    lines = [*pictures, *labels, *secrets]
    if not leaks and (own := _unjudged(groups)):
        return FindingBlock(name, UNJUDGED, None, [*own, *secrets, *_open(groups)])
    if leaks:
        return FindingBlock(name, f"{LEAKS}: {join_words(leaks)}", True, lines, leaks)
    lines += _unseen(groups)
    lines += _open(groups)
    lines.append("That is no proof of safety: it says what these attacks with these settings did on these images.")
    return FindingBlock(name, OPEN, False, lines)


def _pictures(groups: Sequence[ResultGroup], several: bool) -> tuple[list[str], str]:
    """Return what is said of the pictures, and what of them leaked."""
    best = strongest_attack(groups)
    if best is None or best.psnr is None or best.gain is None or best.best_baseline is None:
        return ["No attack recovered pictures that could be judged."], ""
    guess, floor = best.best_baseline
    where = f" (round {best.round})" if several else ""
    size, told = _comparison_in_words(best.gain)
    lines = [
        f"Strongest attack on the pictures: {best.attack}{where}, with a mean PSNR of "
        f"{format_number(best.psnr.value)} dB over {format_count(best.n_images, 'image')}: {size} the best guess "
        f"without the update ({BASELINE_SENTENCES[guess]}, {format_number(floor)} dB){told}."
    ]
    reached, guessed = (
        sum(row[c] >= RECOGNIZABLE_PSNR for row in best.image_rows) for c in ("psnr", f"floor_{guess}_psnr")
    )
    lines.append(
        f"{reached} of its {format_count(len(best.image_rows), 'reconstruction')} reach {RECOGNIZABLE_PSNR:g} dB, from "
        "which on a "
        f"person recognizes the content (that guess: {guessed})."
    )
    alone = max(groups, key=lambda group: len(group.leaked_rows))
    if alone.leaked_rows:
        exact = sum(bool(row.get("exact8")) for row in alone.leaked_rows)
        lines.append(
            f"{alone.attack} brought {len(alone.leaked_rows)} of "
            f"{format_count(len(alone.image_rows), 'reconstruction')} to "
            f"{format_number(RECOGNIZABLE_PSNR, 0)} dB or more, at least {format_number(CLEAR_MARGIN, 0)} dB above "
            "every guess of that same image"
            f"{f'; {exact} of them exact to the 8-bit pixel' if exact else ''}."
        )
    words, named = _identities(groups, several)
    seen = bool(alone.leaked_rows) or exceeds_baseline(best.gain)
    return [*lines, *words], PICTURES if seen else IDENTITIES if named else ""


def _unjudged(groups: Sequence[ResultGroup]) -> list[str]:
    """Return what attacks say of their own reconstructions, where there is nothing to compare these with."""
    lines = []
    for group in groups:
        rows = [row for row in group.unjudged_rows if row.get("image") is not None]
        if not rows:
            continue
        told = ["can't tell how close they came"]
        if any(row.get("verified") is not None for row in rows):
            told = [f"confirms {sum(row.get('verified') is True for row in rows)} of them itself"]
        if labels := [str(row["recovered_label"]) for row in rows if row.get("recovered_label") is not None]:
            told.append(f"names the labels {', '.join(labels)}")
        lines.append(f"{group.attack} brought {format_count(len(rows), 'picture')}; it {join_words(told)}.")
    return [*lines, "They are shown below; give the true images (--images) to have them scored."] if lines else []


def _unseen(groups: Sequence[ResultGroup]) -> list[str]:
    """Return what images that were not tried may give away, where none that was tried came back recognizably."""
    tried = max(group.n_images for group in groups)
    if not tried or any(row["psnr"] >= RECOGNIZABLE_PSNR for group in groups for row in group.image_rows):
        return []
    most = 100 * statistics.rate_upper_bound(0, tried, 0.05)
    return [
        f"None of {format_count(tried, 'image')} reached {RECOGNIZABLE_PSNR:g} dB. "
        f"Of others like these up to {most:.0f} % may (Clopper and Pearson's bound, 95 %)."
    ]


def _identities(groups: Sequence[ResultGroup], several: bool) -> tuple[list[str], bool]:
    """Return what is said of images told from others of their class, and whether that was more than chance."""
    told = [(group, group.identification) for group in groups if group.identification is not None]
    if not told:
        return [], False
    group, best = max(told, key=lambda found: found[1].excess_over_chance(len(told)))
    leaked = best.excess_over_chance(len(told)) > 0
    low, high = (100 * end for end in best.interval)
    where = f" (round {group.round})" if several else ""
    once = ", each counted once" if len(group.image_rows) > best.images else ""
    told_apart = "" if leaked else ": not told apart from it"
    return [
        f"Named: what {group.attack}{where} brought is closer to its own image than to others of the same class for "
        f"{best.hits} of {format_count(best.images, 'image')}{once} "
        f"({format_percent(best.hits / best.images)} [{low:.0f}, {high:.0f}]); "
        f"chance is {format_percent(best.chance)}{told_apart}."
    ], leaked


def _comparison_in_words(gain: Interval) -> tuple[str, str]:
    """Return how a mean compares with a baseline, and how far that can be trusted."""
    if gain.low is None or gain.high is None:
        return (
            f"{format_number(gain.value, sign=True)} dB against",
            "; one image has no interval and tells nothing in general",
        )
    if gain.low > 0:
        few = f"; fewer than {MIN_IMAGES} images are too few to count" if gain.images < MIN_IMAGES else ""
        return f"{format_interval(gain)} dB above", few
    told = "below it" if gain.high < 0 else "not told apart from it"
    return f"{format_interval(gain, sign=True)} dB against", f": {told}"


def _labels(groups: Sequence[ResultGroup], given: bool) -> tuple[list[str], bool]:
    """Return what is said of the labels, and whether they leaked."""
    known = [group for group in groups if group.label_recovery_rate is not None]
    if given:
        return (["The labels were given to the attacker."] if known else []), False
    if not known:
        return [], False
    best = max(known, key=lambda group: group.label_recovery_rate.value if group.label_recovery_rate else 0.0)
    gain = best.label_gain
    leaked = exceeds_baseline(gain)
    told = "" if leaked else ": not shown to leak"
    return [
        f"Labels: {best.attack} names the right class for {format_percent_interval(best.label_recovery_rate)} "
        f"of the images; naming their commonest class every time gets "
        f"{format_percent(best.commonest_label_share)}{told}."
    ], leaked


def _private_tensors(groups: Sequence[ResultGroup]) -> tuple[list[str], bool]:
    """Return what is said of private tensors, and whether any was recovered, if only for one update."""
    best: dict[str, tuple[PrivateTensorRecovery, str]] = {}
    for group in groups:
        for name, secret in group.private_tensors.items():
            if name not in best or _rank(secret) > _rank(best[name][0]):
                best[name] = secret, group.attack
    recovered = {name: found for name, found in best.items() if found[0].n_recovered}
    lines = []
    for attack in dict.fromkeys(attack for _, attack in recovered.values()):
        own = [
            f"{name} for {secret.share_in_words} (relative error {format_error(secret.best_error)} at best)"
            for name, (secret, by) in recovered.items()
            if by == attack
        ]
        lines.append(f"Private values: {attack} recovered the {join_words(own)}.")
    if rest := [name for name in best if name not in recovered]:
        errors = join_words([f"{name} ({format_error(best[name][0].best_error)})" for name in rest])
        lines.append(f"Private values not recovered: {errors}; in brackets the smallest relative error of any attack.")
    return lines, bool(recovered)


def _rank(secret: PrivateTensorRecovery) -> tuple[float, float]:
    """Return a sorting key: more updates first, then the smaller error."""
    return secret.n_recovered / len(secret.errors), -(math.inf if secret.best_error is None else secret.best_error)


def lead_sentence(found: Sequence[FindingBlock]) -> str:
    """Return the answer in a sentence or two."""
    leaking = [f"{finding.subject} ({join_words(finding.leaked)})" for finding in found if finding.leaks]
    open_ = [finding.subject for finding in found if finding.leaks is False]
    parts = []
    if leaking:
        parts.append(f"{LEAKS[:1].upper()}{LEAKS[1:]}: {join_words(leaking)}.")
    if open_:
        parts.append(f"{OPEN[:1].upper()}{OPEN[1:]}: {join_words(open_)}.")
    if not parts and any(finding.verdict == UNJUDGED for finding in found):
        parts.append("What came back is shown below and not judged: the true images are not known.")
    if not parts:
        parts.append("Nothing can be said: no attack applied to any method.")
    return " ".join(parts)


def baseline_names(groups: Sequence[ResultGroup]) -> list[str]:
    """Return the guesses that the images were compared with."""
    return [
        BASELINE_SENTENCES[guess]
        for guess in BASELINES
        if any(f"floor_{guess}_psnr" in r for g in groups for r in g.image_rows)
    ]
