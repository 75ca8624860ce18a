"""The first page: what was examined, what leaked, what the attacker knew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.io.run_layout import UNLIKE_DEFAULTS
from eval.io.text import format_count, join_words, to_sentence
from eval.metrics import validity_flags
from eval.report.blocks import Block, DefinitionList, FindingBlock, Note, Paragraph, Section
from eval.report.load import Run
from eval.report.result_groups import MIN_IMAGES, NOT_ATTACKED
from eval.report.sections.findings import baseline_names, findings
from eval.report.sections.numbered_groups import NumberedGroups
from eval.report.sections.partition_notes import shared_images

MAX_NAMED = 3
"""Attacks that a flag names; more go by their numbers."""
NO_ATTACK_ASKED = "No attack was asked for, so nothing is said of what updates give away."
KNOWLEDGE = {
    "knows_labels": "the labels of the images",
    "knows_batch_size": "how many images an update is computed from",
    "knows_schedule": "number and size of the local steps",
    "knows_order": "which image was in which step",
    "knows_randomness": "the method's own random numbers",
    "knows_defense": "the defense and its settings",
    "knows_optimizer": "what clients train by (their optimizer)",
    "knows_private_init": "the values that private tensors started from",
    "sees_buffers": "shared buffers such as batch-norm statistics",
}
"""Settings of the threat model in words."""


def facts(run: Run) -> list[tuple[str, str]]:
    """Return what was examined, at a glance."""
    setting = run.settings
    federation, observe = setting.section("federation"), setting.section("observe")
    clients = setting.section("federation", "partition").get("clients")
    attacked = {str(row["picture"]) for row in run.rows if row.get("picture") is not None}
    watched = observe.get("clients")
    batch = observe.get("batch_size")
    chosen = [str(name) for name in observe.get("classes") or ()]
    entries = {
        "Data": _name(setting.section("task", "dataset")),
        "Network": _name(setting.section("task", "model")),
        "Clients": f"{clients} ({_name(setting.section('federation', 'partition'))})" if clients is not None else "",
        "Rounds": _rounds(federation.get("rounds"), run),
        "Methods": ", ".join(dict.fromkeys(group.method for group in run.groups)),
        "Defenses": ", ".join(
            dict.fromkeys(g.defense for g in run.groups if setting.defense_name(g.defense) != "none")
        ),
        "Attacks": ", ".join(dict.fromkeys(group.attack for group in run.groups if group.attack != NOT_ATTACKED)),
        "Watched": f"client {join_words([str(c) for c in watched])}"
        if run.attacked and isinstance(watched, list)
        else "",
        "Images": _image_count(attacked)
        + (f"{batch} per update" if batch else "all of a client at once")
        + (f", only of {join_words(chosen)}" if chosen else "")
        if attacked
        else "",
        "Seeds": join_words([str(seed) for seed in dict.fromkeys(row["seed"] for row in run.rows)]),
    }
    return [(term, words) for term, words in entries.items() if words]


def _image_count(pictures: set[str]) -> str:
    """Return how many images were attacked, and how many of them are new to the clients."""
    new, count = sum(":test/" in picture for picture in pictures), len(pictures)
    said = f"test image{'' if new == 1 else 's'} that no client trained on"
    return f"{count}, " if not new else f"{count} {said}, " if new == count else f"{count}, {new} of them {said}, "


def verdict_section(numbered: NumberedGroups) -> tuple[Section, list[FindingBlock]]:
    """Return the verdicts, under the flags that qualify them."""
    run = numbered.run
    if not run.attacked:
        return Section(
            "leaked",
            "What leaked",
            [
                *unfinished_notes(run),
                *_mixed_code_notes(run),
                *_unlike_defaults_notes(run),
                *_overlap_notes(run),
                Paragraph(NO_ATTACK_ASKED),
            ],
        ), []
    given = bool(run.settings.threat.get("knows_labels", False))
    found = findings(run.groups, labels_given=given)
    blocks: list[Block] = [
        *unfinished_notes(run),
        *_mixed_code_notes(run),
        *_unlike_defaults_notes(run),
        *_overlap_notes(run),
        *_update_notes(run),
        *flag_notes(numbered),
        *found,
    ]
    guesses = baseline_names([group for group in run.groups if group.attacked_rows])
    if guesses:
        blocks.append(
            Paragraph(
                "“Shown to leak” means: over the attacked images, the strongest attack comes closer to the true "
                "picture than the best guess made without the update "
                f"({join_words(guesses, 'or')}), and the 95 % interval of that difference, image by image, lies above "
                f"zero, over at least {MIN_IMAGES} images; or single "
                "images come back recognizable and far above every guess of themselves; or what came back names its "
                "image among others of the same class (“identity”) more often than chance does, by a bar that rises "
                "with the number of attacks. Labels are judged by their interval likewise; a private value leaked if "
                "it was recovered for any update. The attack is picked after the fact as the one that leaks most, and "
                "the intervals shown are not widened for that. “Not shown” is never “safe”: another attack may do "
                "better."
            )
        )
    return Section("leaked", "What leaked", blocks), found


def unfinished_notes(run: Run) -> list[Block]:
    """Return the parts of the run that are not there, and why."""
    cells = [cell for cell in run.metadata.get("cells") or [] if isinstance(cell, Mapping)]
    left = [cell for cell in cells if cell.get("status", "finished") != "finished"]
    if not left:
        return []
    entries = [
        (str(cell.get("name", "?")), to_sentence(str(cell.get("reason") or cell.get("status")))) for cell in left
    ]
    return [
        Note(f"Incomplete: {len(left)} of {format_count(len(cells), 'part')} of this run are not finished", entries)
    ]


def _mixed_code_notes(run: Run) -> list[Block]:
    words = mixed_code_warning(run.metadata)
    return [Note("Computed by different source code", [("code", to_sentence(words))])] if words else []


def _unlike_defaults_notes(run: Run) -> list[Block]:
    words = str(run.metadata.get(UNLIKE_DEFAULTS) or "")
    return [Note("To know before methods are compared", [("defaults", to_sentence(words))])] if words else []


def _update_notes(run: Run) -> list[Block]:
    """Return what is to be known of updates of the user's own, and whether they contradict their settings."""
    against, notes, said = str(run.metadata.get("contradiction") or ""), run.metadata.get("notes"), list[Block]()
    if against:
        said.append(Note("Settings and update contradict each other", [("contradiction", to_sentence(against))]))
    if isinstance(notes, list) and notes:
        said.append(Note("To know of what was audited", [("note", to_sentence(str(words))) for words in notes]))
    return said


def _overlap_notes(run: Run) -> list[Block]:
    said = shared_images(run.partitions)
    return [Note("To know of the split", [("overlap", words) for words in said])] if said else []


def mixed_code_warning(about: Mapping[str, Any]) -> str | None:
    """Return a sentence on finished cells that other code computed than put them together, or None.

    Args:
        about: `run.json`.
    """
    cells = [cell for cell in about.get("cells") or [] if isinstance(cell, Mapping) and "code" in cell]
    known = {str(cell.get("id")): str(cell["code"]) for cell in cells}
    codes = set(known.values())
    if len(codes) < 2 and codes <= {about.get("code")}:
        return None
    stale = sum(code != about.get("code") for code in known.values())
    return (
        f"Not all of one version: {stale} of {format_count(len(known), 'finished cell')} were computed by source "
        "code other than that which put them together; remove cells/ and run it again to have all of one"
    )


def flag_notes(numbered: NumberedGroups) -> list[Block]:
    """Return the validity flags, each with what it means and what it was raised for."""
    raised: dict[str, list[int]] = {}
    for key, group in numbered.by_number.items():
        for flag in group.flags(numbered.run.settings):
            raised.setdefault(flag, []).append(key)
    if not raised:
        return []
    entries = [
        (flag, f"{words} {_attacks_with_flag(numbered, raised[flag])}")
        for flag, words in validity_flags.FLAGS.items()
        if flag in raised
    ]
    return [Note("To know before trusting a figure", entries)]


def _attacks_with_flag(numbered: NumberedGroups, keys: list[int]) -> str:
    """Return what a flag was raised for: names if there are few, else the numbers of the tables."""
    if len(keys) == len(numbered.by_number):
        return (
            "Raised for every attack."
            if len(keys) > 1
            else f"Raised for {numbered.label(numbered.by_number[keys[0]])}."
        )
    if len(keys) <= MAX_NAMED:
        return f"Raised for {join_words([numbered.label(numbered.by_number[key]) for key in keys])}."
    runs: list[list[int]] = []
    for key in keys:
        if runs and key == runs[-1][-1] + 1:
            runs[-1].append(key)
        else:
            runs.append([key])
    spans = [f"{run[0]} to {run[-1]}" if len(run) > 2 else join_words([str(key) for key in run]) for run in runs]
    numbers = join_words(spans)
    return f"Raised for {len(keys)} of {len(numbered.by_number)} attacks; their numbers in the tables: {numbers}."


def attacker_section(numbered: NumberedGroups) -> Section:
    """Return what the attacker was assumed to see and know."""
    run = numbered.run
    known, unknown = attacker_knowledge(run.settings.threat, defended=numbered.defended)
    used = dict.fromkeys(item for row in run.rows for item in row.get("knowledge") or [])
    entries = [
        (
            "Who",
            "An honest-but-curious server (or whoever reads its traffic): it follows the protocol and keeps what "
            "it gets.",
        ),
        (
            "Sees",
            f"The parameters it sends to a client, {_returned(run)}, the network's architecture, and the method with "
            "its settings. Never the images.",
        ),
        ("Knows", to_sentence(join_words(known)) if known else "Nothing beyond that."),
        ("Does not know", to_sentence(join_words(unknown)) if unknown else "Nothing on this list was withheld."),
    ]
    if groups := _groups(run):
        sizes = join_words([f"groups of {size} ({label})" for label, size in groups.items()])
        told = f"no single update, but the weighted mean over {sizes} with the watched client in it."
        left = "Clients left over make the last group larger; its size and members are known."
        entries.insert(2, ("Aggregated", f"{to_sentence(told)} {left}"))
    if used:
        entries.append(("Made use of", to_sentence(join_words(list(used)))))
    if observed := run.settings.section("observe", "method"):
        changes = join_words([f"{key} = {value}" for key, value in observed.items()])
        entries.append(
            (
                "Observed round",
                f"Differs from those of training in {changes}, where a method has it; its update does not "
                "enter training.",
            )
        )
    return Section("attacker", "What the attacker was assumed to know", [DefinitionList(entries)])


def _groups(run: Run) -> dict[str, int]:
    """Return the defenses that show the server means over several clients alone, and over how many at least."""
    sizes = {label: run.settings.group_size(label) for label in run.settings.defenses}
    return {label: size for label, size in sizes.items() if size > 1}


def _returned(run: Run) -> str:
    """Return what comes back from a client, as far as the server sees it."""
    if not (groups := _groups(run)):
        return "the update that comes back"
    if len(groups) == len(run.settings.defenses):
        return "the mean of what comes back from a group of them"
    return f"the update that comes back (under {join_words(list(groups))} the mean of a group's)"


def attacker_knowledge(threat: Mapping[str, Any], *, defended: bool = True) -> tuple[list[str], list[str]]:
    """Return what the attacker knows and what it does not, in words."""
    known: list[str] = []
    unknown: list[str] = []
    for key, value in threat.items():
        if key == "knows_defense" and not defended:
            continue
        if key == "history_rounds":
            if value:
                known.append(
                    f"up to {format_count(int(value), 'earlier round')} of the same client, as many as there are"
                )
            continue
        (known if value else unknown).append(KNOWLEDGE.get(key, key.replace("_", " ")))
    return known, unknown


def _name(spec: Mapping[str, Any]) -> str:
    """Return a name with its numbers of pixels, if it has any."""
    name, size = str(spec.get("function", spec.get("name", ""))), spec.get("input_shape")
    if isinstance(size, Sequence) and not isinstance(size, str) and size:
        return f"{name}, " + "\N{MULTIPLICATION SIGN}".join(map(str, size))
    return name


def _rounds(total: object, run: Run) -> str:
    if total is None:
        return ""
    watched = sorted({group.round for group in run.groups if group.attacked_rows})
    return f"{total}" + (f"; attacked after {join_words([str(number) for number in watched])}" if watched else "")
