"""Hundreds of slips of the finger in a full config: every one is refused, and nearly all get the right word back."""

import copy
import random
import string
from collections.abc import Iterator
from typing import Any

import pytest

from eval.commands.list_ import registries
from eval.experiment import yaml_config
from eval.experiment.config_catalog import CONFIGS
from eval.experiment.source_catalog import NAMED_IN_CONFIGS

MUTANTS, RIGHT = 300, 0.95
Path = tuple[str | int, ...]


def slips(word: str, draw: random.Random) -> str:
    """`word` with a character left out, put in, replaced, or swapped with its neighbor."""
    place = draw.randrange(len(word))
    letter = draw.choice(string.ascii_lowercase + "_-")
    wrong = {
        "leave out": word[:place] + word[place + 1 :],
        "put in": word[:place] + letter + word[place:],
        "replace": word[:place] + letter + word[place + 1 :],
        "swap": word[: max(place - 1, 0)]
        + word[place : place + 1]
        + word[max(place - 1, 0) : place]
        + word[place + 1 :],
    }
    return wrong[draw.choice(list(wrong))]


def keys(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every key."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            if key != "private_lr":  # names of tensors, which no config knows: the result notes a slip
                yield from keys(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from keys(inner, (*path, index))


def names(plain: dict[str, Any]) -> list[tuple[Path, str]]:
    """Where a registered name stands, and every name that could stand there."""
    known = registries()
    return [(path, name) for path, kind in NAMED_IN_CONFIGS.items() for name in known[kind].names()]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The quickstart with every default written out, and every key that may stand beside."""
    found = yaml_config.to_plain(yaml_config.load(CONFIGS / "quickstart.yaml"))
    found["attack"][0] |= {"as": "first", "with": {"observe.batch_size": 2}}
    found["sweep"] = {"attack.iterations": [1, 2]}
    return found


def mutants(plain: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The right word, the wrong one, and the config that has it: every key first, then keys and names at random."""
    draw = random.Random(0)
    paths, places = list(keys(plain)), names(plain)
    chosen: list[tuple[Path, str | None]] = [(path, None) for path in paths]
    chosen += [(path, name) for path, name in places]
    while len(chosen) < MUTANTS:
        chosen.append((draw.choice(paths), None))
    for path, name in chosen:
        changed = copy.deepcopy(plain)
        right = str(path[-1]) if name is None else name
        siblings = set(at(plain, path[:-1])) if name is None else {other for _, other in places}
        wrong = slips(right, draw)
        while wrong in siblings or not wrong or wrong == right:
            wrong = slips(right, draw)
        holder = at(changed, path[:-1])
        if name is None:
            items = [(wrong if key == path[-1] else key, value) for key, value in holder.items()]
            holder.clear()
            holder.update(items)
        else:
            holder[path[-1]] = wrong
        yield right, wrong, changed


def at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def test_slips_are_refused_and_set_right(plain):
    yaml_config.read(plain)
    total, missed = 0, []
    for right, wrong, changed in mutants(plain):
        total += 1
        with pytest.raises(ValueError, match=r"\w") as error:
            yaml_config.read(changed)
        message = str(error.value)
        words = (right, right.partition(".")[0], right.rpartition(".")[2])  # of a dotted key the part that is wrong
        if not any(f"did you mean '{word}'" in message or f".{word}'?" in message for word in words) and (
            f"a mapping with '{right}'" not in message
        ):
            missed.append((right, wrong, message[:200]))
    assert total >= MUTANTS
    assert len(missed) <= (1 - RIGHT) * total, f"{len(missed)} of {total} not set right:\n" + "\n".join(
        map(str, missed)
    )
