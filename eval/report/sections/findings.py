"""What leaked, in plain words: a verdict for every method under every defence, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eval.io.text import count, join
from eval.metrics import statistics
from eval.metrics.statistics import Interval
from eval.report.blocks import Finding
from eval.report.formatting import error, interval, number, percent, percent_interval
from eval.report.result_groups import CLEAR, FEWEST, FLOORS, RECOGNISED, Group, Secret, shown

GUESSES = {
    "mean": "every image's own mean colour",
    "grey": "mid grey",
    "noise": "noise",
    "nearest": "the most similar image of other clients",
}
PICTURES, NAMES = "pictures", "identity of pictures"
"""What leaks of pictures: what they show, or no more than which of several they were."""
LEAKS, OPEN = "shown to leak", "not shown to leak beyond what was known before"


def subject(group: Group) -> str:
    """The method and its defence."""
    return group.method if group.defense == "none" else f"{group.method} with {group.defense}"


def by_subject(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups by method and defence, in order."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(subject(group), []).append(group)
    return found


def strongest(groups: Sequence[Group]) -> Group | None:
    """The group whose gain over its best floor is largest at the lower end of its interval; None without pictures.

    An interval of fewer than `FEWEST` images tells hardly anything: these rank by their means, behind all others.
    """

    def certain(group: Group) -> tuple[float, float]:
        assert group.gain is not None
        few = group.gain.low is None or group.gain.images < FEWEST
        return (-math.inf if few or group.gain.low is None else group.gain.low, group.gain.value)

    judged = [group for group in groups if group.gain is not None]
    return max(judged, key=certain) if judged else None


def findings(groups: Sequence[Group], *, labels_given: bool = False) -> list[Finding]:
    """One finding for every method under every defence."""
    several = len({group.round for group in groups}) > 1
    return [_finding(name, own, several, labels_given) for name, own in by_subject(groups).items()]


def _open(groups: Sequence[Group]) -> list[str]:
    """What attacks leave open of a subject."""
    from eval.report.sections.inconclusive import of_rows, opened  # which is written in words of this package

    return [
        f"Not decided: {one}." for one in opened([one for group in groups for one in of_rows(group.attack, group.rows)])
    ]


def _finding(name: str, groups: Sequence[Group], several: bool, labels_given: bool) -> Finding:
    if not any(group.scored for group in groups):
        reasons = list(dict.fromkeys(reason for group in groups for reason in group.refusals))
        return Finding(name, "not examined", None, [f"No attack says anything about it: {join(reasons)}."])
    pictures, pictures_leak = _pictures(groups, several)
    labels, labels_leak = _labels(groups, labels_given)
    secrets, secrets_leak = _secrets(groups)
    leaks = [*([pictures_leak] if pictures_leak else [])]
    leaks += [what for what, leaked in (("labels", labels_leak), ("private values", secrets_leak)) if leaked]
    lines = [*pictures, *labels, *secrets]
    if leaks:
        return Finding(name, f"{LEAKS}: {join(leaks)}", True, lines, leaks)
    lines += _unseen(groups)
    lines += _open(groups)
    lines.append("That is no proof of safety: it says what these attacks with these settings did on these images.")
    return Finding(name, OPEN, False, lines)


def _pictures(groups: Sequence[Group], several: bool) -> tuple[list[str], str]:
    """What is said of the pictures, and what of them leaked."""
    best = strongest(groups)
    if best is None or best.psnr is None or best.gain is None or best.best_floor is None:
        return ["No attack recovered pictures that could be judged."], ""
    guess, floor = best.best_floor
    where = f" (round {best.round})" if several else ""
    size, told = _against(best.gain)
    lines = [
        f"Strongest attack on the pictures: {best.attack}{where}, with a mean PSNR of {number(best.psnr.value)} dB "
        f"over {count(best.images, 'image')}: {size} the best guess without the update ({GUESSES[guess]}, "
        f"{number(floor)} dB){told}."
    ]
    reached, guessed = (sum(row[c] >= RECOGNISED for row in best.pictured) for c in ("psnr", f"floor_{guess}_psnr"))
    lines.append(
        f"{reached} of its {count(len(best.pictured), 'reconstruction')} reach {RECOGNISED:g} dB, from which on a "
        f"person recognises the content (that guess: {guessed})."
    )
    alone = max(groups, key=lambda group: len(group.leaked))
    if alone.leaked:
        exact = sum(bool(row.get("exact8")) for row in alone.leaked)
        lines.append(
            f"{alone.attack} brought {len(alone.leaked)} of {count(len(alone.pictured), 'reconstruction')} to "
            f"{number(RECOGNISED, 0)} dB or more, at least {number(CLEAR, 0)} dB above every guess of that same image"
            f"{f'; {exact} of them exact to the 8-bit pixel' if exact else ''}."
        )
    words, named = _named(groups, several)
    seen = bool(alone.leaked) or shown(best.gain)
    return [*lines, *words], PICTURES if seen else NAMES if named else ""


def _unseen(groups: Sequence[Group]) -> list[str]:
    """What images that were not tried may give away, where none that was tried came back recognizably."""
    tried = max(group.images for group in groups)
    if not tried or any(row["psnr"] >= RECOGNISED for group in groups for row in group.pictured):
        return []
    most = 100 * statistics.at_most(0, tried, 0.05)
    return [
        f"None of {count(tried, 'image')} reached {RECOGNISED:g} dB. Of others like these up to {most:.0f} % may "
        "(Clopper and Pearson's bound, 95 %)."
    ]


def _named(groups: Sequence[Group], several: bool) -> tuple[list[str], bool]:
    """What is said of images told from others of their class, and whether that was more than chance."""
    told = [(group, group.named) for group in groups if group.named is not None]
    if not told:
        return [], False
    group, best = max(told, key=lambda found: found[1].beyond(len(told)))
    leaked = best.beyond(len(told)) > 0
    low, high = (100 * end for end in best.interval)
    where = f" (round {group.round})" if several else ""
    once = ", each counted once" if len(group.pictured) > best.images else ""
    told_apart = "" if leaked else ": not told apart from it"
    return [
        f"Named: what {group.attack}{where} brought is closer to its own image than to others of the same class for "
        f"{best.hits} of {count(best.images, 'image')}{once} ({percent(best.hits / best.images)} [{low:.0f}, "
        f"{high:.0f}]); chance is {percent(best.chance)}{told_apart}."
    ], leaked


def _against(gain: Interval) -> tuple[str, str]:
    """How a mean compares with a floor, and how far that can be trusted."""
    if gain.low is None or gain.high is None:
        return f"{number(gain.value, sign=True)} dB against", "; one image has no interval and tells nothing in general"
    if gain.low > 0:
        few = f"; fewer than {FEWEST} images are too few to count" if gain.images < FEWEST else ""
        return f"{interval(gain)} dB above", few
    told = "below it" if gain.high < 0 else "not told apart from it"
    return f"{interval(gain, sign=True)} dB against", f": {told}"


def _labels(groups: Sequence[Group], given: bool) -> tuple[list[str], bool]:
    """What is said of the labels, and whether they leaked."""
    known = [group for group in groups if group.labels is not None]
    if given:
        return (["The labels were given to the attacker."] if known else []), False
    if not known:
        return [], False
    best = max(known, key=lambda group: group.labels.value if group.labels else 0.0)
    gain = best.label_gain
    leaked = shown(gain)
    told = "" if leaked else ": not shown to leak"
    return [
        f"Labels: {best.attack} names the right class for {percent_interval(best.labels)} of the images; naming their "
        f"commonest class every time gets {percent(best.common_label)}{told}."
    ], leaked


def _secrets(groups: Sequence[Group]) -> tuple[list[str], bool]:
    """What is said of private tensors, and whether any was recovered, if only for one update."""
    best: dict[str, tuple[Secret, str]] = {}
    for group in groups:
        for name, secret in group.secrets.items():
            if name not in best or _rank(secret) > _rank(best[name][0]):
                best[name] = secret, group.attack
    recovered = {name: found for name, found in best.items() if found[0].hits}
    lines = []
    for attack in dict.fromkeys(attack for _, attack in recovered.values()):
        own = [
            f"{name} for {secret.share} (relative error {error(secret.best)} at best)"
            for name, (secret, by) in recovered.items()
            if by == attack
        ]
        lines.append(f"Private values: {attack} recovered the {join(own)}.")
    if rest := [name for name in best if name not in recovered]:
        errors = join([f"{name} ({error(best[name][0].best)})" for name in rest])
        lines.append(f"Private values not recovered: {errors}; in brackets the smallest relative error of any attack.")
    return lines, bool(recovered)


def _rank(secret: Secret) -> tuple[float, float]:
    """More updates first, then the smaller error."""
    return secret.hits / len(secret.errors), -(math.inf if secret.best is None else secret.best)


def lead(found: Sequence[Finding]) -> str:
    """The answer in a sentence or two."""
    leaking = [f"{finding.subject} ({join(finding.what)})" for finding in found if finding.leaks]
    open_ = [finding.subject for finding in found if finding.leaks is False]
    parts = []
    if leaking:
        parts.append(f"{LEAKS[:1].upper()}{LEAKS[1:]}: {join(leaking)}.")
    if open_:
        parts.append(f"{OPEN[:1].upper()}{OPEN[1:]}: {join(open_)}.")
    if not parts:
        parts.append("Nothing can be said: no attack applied to any method.")
    return " ".join(parts)


def floor_names(groups: Sequence[Group]) -> list[str]:
    """The guesses that the images were compared with."""
    return [GUESSES[guess] for guess in FLOORS if any(f"floor_{guess}_psnr" in r for g in groups for r in g.pictured)]
