"""What an audit leaves open: an attack that could not be tried, a search that gave up, too few images to tell."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attacks.result import Remark
from eval.io.text import join_words
from eval.metrics import self_verification
from eval.metrics.score import Row
from eval.report.result_groups import MIN_IMAGES

OutcomeKind = Literal[
    "settled", "borne out", "ran", "searched", "gave up", "contradicted", "limit", "fact", "blind", "cut short"
]
"""What an attack came to on one update: it confirmed all images, or nearly all pixels; the whole update bears out what
it found, but not to a quarter of a level; it can tell whether it is right and was not; it can't tell; its search gave
up; the rest of the update contradicts what it found, or leaves open whether it was plain SGD; a limit of its own
stopped it; a fact about the update did; it is after no images; a time limit or an interrupt came before its end."""
OPEN_KINDS = {"gave up", "contradicted", "cut short"}
"""What leaves an update open whatever other attacks came to, unless one settles it."""
MORE_TIME = "more time (--minutes), or the same command without a limit"
CONTRADICTING = {Remark.CONTRADICTED, Remark.RULE_UNKNOWN, Remark.SIZE_CONTRADICTED}
"""What an attack says of a picture that the rest of the update contradicts, or leaves open whether it was plain SGD."""
FEATURES_ALONE = "only features came back, the input of a layer behind the first, and a picture may follow from them"
"""What is said of an attack that recovers what a later layer was given."""
FEATURES_BEYOND = (
    "only features came back, what the first layer takes: it lies beyond the range of inputs, as of inputs that were "
    "brought to another one, and they may follow from it"
)
"""What is said of one that recovers what the first layer was given, which is no input as stated."""
COVERED = {"rconv": "cascade", "rgap": "cascade", "analytic": "cascade", "april": "cascade"}
"""Attacks whose limits do not count where another, which takes every network that they do, has an answer."""


@dataclass(frozen=True)
class Outcome:
    """What one attack came to on one update.

    Attributes:
        attack: its label.
        update: which, as audits number them.
        kind: see `Kind`.
        words: why, of a refusal or of a search that gave up.
        remarks: what the attack says of its result for code to act on.
    """

    attack: str
    update: Hashable
    kind: OutcomeKind
    words: str = ""
    remarks: frozenset[Remark] = frozenset()

    @property
    def number(self) -> Any:
        """The update in plain data: its number, or how a run names it."""
        return list(self.update) if isinstance(self.update, tuple) else self.update


@dataclass(frozen=True)
class OpenQuestion:
    """One thing that keeps an audit from being decided, in words.

    Attributes:
        what: is open.
        why: it is.
        remedy: what would decide it.
    """

    what: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. To decide it: {self.remedy}"

    def plain(self) -> dict[str, str]:
        """Return the question as plain data."""
        return {"what": self.what, "why": self.why, "remedy": self.remedy}


def outcomes_of_rows(attack: str, rows: Sequence[Row]) -> list[Outcome]:
    """Return what an attack came to on every update, by its rows.

    Args:
        attack: its label.
        rows: one or more of every update.
    """
    updates: dict[Hashable, list[Row]] = {}
    for row in rows:
        if not row.get("spared"):
            updates.setdefault(update_key(row), []).append(row)
    return [_of_update(attack, update, own) for update, own in updates.items()]


def update_key(row: Row) -> Hashable:
    """Return what tells an update from others: its number in a user's audit, in a run its seed and round, too."""
    update = row.get("update")
    return update if isinstance(update, int) else (row.get("seed"), row.get("round"), update)


def _of_update(attack: str, update: Hashable, rows: Sequence[Row]) -> Outcome:
    first = rows[0]
    if first.get("cut_short") and (first.get("given_up") or "not_applicable" in first):
        return Outcome(attack, update, "cut short", str(first.get("given_up") or first["not_applicable"]))
    if "not_applicable" in first:
        return Outcome(attack, update, "limit" if first.get("limit") else "fact", str(first["not_applicable"]))
    if first.get("given_up"):
        return Outcome(attack, update, "gave up", str(first["given_up"]))
    if self_verification.are_settled(rows):
        return Outcome(attack, update, "settled")
    note, remarks = str(first.get("note", "")), self_verification.remarks_of(first)
    features_nearly = Remark.NEARLY_TOLD in remarks and not first.get("candidates")
    if remarks & CONTRADICTING or features_nearly:  # nobody asks for the true images of these
        return Outcome(attack, update, "contradicted", note, remarks)
    if first.get("approximate") and first.get("candidates"):
        return Outcome(attack, update, "borne out", note, remarks)
    told = next((row["verified"] for row in rows if row.get("verified") is not None), None)
    kind = _kind(told, pictured=bool(first.get("candidates")))
    alone = FEATURES_BEYOND if Remark.BEYOND_RANGE in first.get("remarks", ()) else FEATURES_ALONE
    words = alone if kind == "blind" and _has_features_alone(first) else ""
    if Remark.ONE_OF_SEVERAL in remarks and kind in {"ran", "searched"}:
        return Outcome(attack, update, kind, note, remarks)
    return Outcome(attack, update, kind, words)


def _has_features_alone(row: Row) -> bool:
    """Return whether an attack recovered what a later layer was given, and no private tensor that it was after."""
    given = any(str(name).partition("/")[0] == "features" for name in row.get("unscored", ()))
    return given and not row.get("private_errors")


def _kind(verified: bool | None, *, pictured: bool) -> OutcomeKind:
    if not pictured:
        return "blind"
    return "searched" if verified is None else "ran"


def find_open_questions(outcomes: Sequence[Outcome]) -> list[OpenQuestion]:
    """Return what is left open of the images by what attacks came to; nothing of updates that one of them settled.

    Args:
        outcomes: of all attacks on all updates.
    """
    updates: dict[Hashable, list[Outcome]] = {}
    for one in outcomes:
        updates.setdefault(one.update, []).append(one)
    stopped: dict[str, list[Outcome]] = {}
    for own in updates.values():
        if any(one.kind == "settled" for one in own):
            continue
        limits, facts = _limits(own), [one for one in own if one.kind == "fact"]
        for one in (*limits, *(one for one in own if one.kind in OPEN_KINDS)):
            stopped.setdefault(one.kind, []).append(one)
        for one in own:
            if Remark.ONE_OF_SEVERAL in one.remarks:
                stopped.setdefault("several", []).append(one)
        features = [one for one in own if one.kind == "blind" and one.words in {FEATURES_ALONE, FEATURES_BEYOND}]
        if features and all(one.kind in {"blind", "fact"} for one in own):  # no attack was after pictures
            stopped.setdefault("blind", []).extend(features)
        if facts and not limits and all(one.kind in {"fact", "limit"} for one in own):  # nothing was tried
            stopped.setdefault("fact", []).append(facts[-1])
    total = len(updates)
    return [_open_question(kind, found, total) for kind, found in stopped.items()]


def is_answered(outcomes: Sequence[Outcome]) -> bool:
    """Return whether of every update an attack has an answer that does not hang on chance."""
    updates = {one.update for one in outcomes}
    return updates == {one.update for one in outcomes if one.kind in {"settled", "borne out", "ran"}}


def _limits(own: Sequence[Outcome]) -> list[Outcome]:
    """Return the refusals of one update that leave open what is in it, as no attack that can tell has got through."""
    ran = {one.attack for one in own if one.kind == "ran"}
    told = {one.attack.rpartition("+")[2] for one in own if one.kind in {"fact", "ran"}}
    return [
        one
        for one in own
        # what ran decides for others but for the one that undoes more networks than it does
        if one.kind == "limit"
        and all(COVERED.get(name) == one.attack for name in ran)
        and COVERED.get(one.attack) not in told
    ]


_QUESTIONS: dict[str, tuple[str, str]] = {
    "limit": (
        "{} could not be tried",
        "write the network, with the same weights, of layers that these attacks undo, or raise the setting that is "
        "named",
    ),
    "contradicted": (
        "what {} found is not borne out",
        "state how the client trained (--method '{name: fedavg, optimizer: adam, lr: 0.001, steps: 2}', say), the "
        "clients that it is the mean of (--clients), and the loss (--loss) if it is another; take off what else "
        "was added (a control variate, a regularizer); where tensors have step sizes of their own, divide each by "
        "its own and audit that as the gradient (--kind gradient)",
    ),
    "gave up": (
        "the search of {} failed",
        "more iterations or restarts (--attack '{name: ig, iterations: 10000, restarts: 4}'), or other settings",
    ),
    "several": (
        "what {} found is told but for which of several pictures it is",
        "look at what came back (--out): count it as leaked where its parts are those of the true ones",
    ),
    "blind": (
        "no attack came to a picture",
        "attacks that are after pictures (without --attack all that fit are tried), or a search such as ig",
    ),
    "cut short": ("{} ran out of time", MORE_TIME),
}
"""By kind of outcomes what is open, of which attacks, and what decides it."""
_NOTHING_SAID = ("no attack says anything", "an attack that applies, or settings by which one does")


def _open_question(kind: OutcomeKind | str, found: Sequence[Outcome], total: int) -> OpenQuestion:
    """Return outcomes of one kind as an open question in words."""
    names = list(dict.fromkeys(one.attack for one in found))
    number = len({one.update for one in found})
    some = "" if number == total else f" of {number} of {total} updates"
    reasons: dict[str, list[str]] = {}
    for one in found:
        reasons.setdefault(one.words, []).append(one.attack)
    why = "; ".join(f"{join_words(list(dict.fromkeys(own)))}: {words}" for words, own in reasons.items())
    if len(reasons) == 1:
        why = next(iter(reasons))
    if kind == "limit":
        why += f" (a limit of {'this attack' if len(names) == 1 else 'these attacks'}, not of what the update tells)"
    if kind == "several":
        why += ". Figures compare it with the true ones place by place, which may be low though its parts are right"
    question, remedy = _QUESTIONS.get(kind, _NOTHING_SAID)
    return OpenQuestion(f"{question.format(join_words(names))}{some}", why, remedy)


def not_begun(attacks: Sequence[str]) -> OpenQuestion:
    """Say that the time limit came before attacks."""
    return OpenQuestion(f"{join_words([*attacks])} could not be tried", "the time limit came before", MORE_TIME)


def cut_short(attacks: Sequence[str]) -> OpenQuestion:
    """Say that searches ended before their last iteration, so that they may have come closer."""
    return OpenQuestion(f"{join_words([*attacks])} did not search to the end", "its search was cut short", MORE_TIME)


def too_few_images(attack: str, images: int, *, captured: bool = False) -> OpenQuestion:
    """Say that so few images were attacked that content can't be told from chance.

    Args:
        attack: that came closer to one of them than every guess.
        images: how many there are.
        captured: whether they are those of one captured update, which holds no others.
    """
    remedy = f"attack {MIN_IMAGES} images or more (--count)"
    if captured:
        remedy = (
            f"one update holds no further images: let the model make updates of {MIN_IMAGES} images or more "
            f"(hyperleak audit model MODULE:FUNCTION --images FILE.npz --count {MIN_IMAGES})"
        )
    return OpenQuestion(
        f"{attack} came closer to an image than every guess",
        f"{images} image(s) are too few to tell content from chance",
        remedy,
    )


def flat_pictures() -> OpenQuestion:
    """Say that a guess has all the images, so that only an exact attack could show more, and none did."""
    return OpenQuestion(
        "nothing tells what comes back from a guess",
        "all images are of one color, or nearly: a guess of that color has them without the update",
        "attack images that show something",
    )


def unjudged_pictures(attacks: Sequence[str]) -> OpenQuestion:
    """Say that nobody can tell what pictures show, as the true images are not known."""
    return OpenQuestion(
        f"what {join_words([*attacks])} brought is not judged",
        "without the true images nobody can say whether it shows them",
        "give the true images (--images)",
    )


def limit_without_figure(figure: str, limit: float) -> OpenQuestion:
    """Say that a limit can't be compared with anything."""
    why = f"so nothing can be said about the limit {limit:g}"
    return OpenQuestion(
        f"no {figure.upper()} could be taken", why, "an attack that recovers images, or the true images"
    )


def contradicted_settings(words: str) -> OpenQuestion:
    """Say that settings and update contradict each other."""
    return OpenQuestion(
        "settings and update contradict each other", words, "settings that fit the update, or the right file"
    )
