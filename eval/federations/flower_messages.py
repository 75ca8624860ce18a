"""What messages of Flower say of a client's training: the weights before and after, and how it trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from fl.types import OPTIMIZERS

CONFIG_NAMES: Mapping[str, tuple[str, ...]] = {
    "lr": ("lr", "learning-rate", "client-lr", "local-lr", "client-learning-rate"),
    "epochs": ("local-epochs", "epochs", "num-epochs", "num-local-epochs"),
    "steps": ("local-steps", "num-steps", "max-steps", "num-local-steps"),
    "batch_size": ("batch-size", "local-batch-size", "train-batch-size"),
    "optimizer": ("optimizer", "client-optimizer", "local-optimizer"),
    "momentum": ("momentum", "client-momentum"),
    "weight_decay": ("weight-decay",),
}
"""What apps call a fact of training in their config, as far as we know; underscores count as hyphens."""
EXAMPLES = ("num-examples", "num-samples", "num-train-examples")
"""What apps call the number of a client's examples among its metrics."""
ROUNDS = ("server-round", "current-round", "round")
PROXIMAL = ("proximal-mu",)
"""FedProx's penalty, which moves every local step but the first."""
LEAST_SHARE = 0.25
"""Of what was sent, that weights after a round are taken to have in them at least."""
OPTIMIZER_FACTS = ("optimizer", "momentum", "weight_decay")
"""Facts that are taken from one source together: a momentum means nothing without its optimizer."""


class UnreadableError(ValueError):
    """What a message carries can't be audited as one update of known weights."""


@dataclass(frozen=True)
class SentWeights:
    """What a client was sent, taken before training may change the message.

    Attributes:
        arrays: by the name of the record, then of the array.
        config: of all config records together, by name.
    """

    arrays: Mapping[str, Mapping[str, Array]]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, content: RecordDict) -> SentWeights:
        """Return what a message brings."""
        arrays = {key: dict(record) for key, record in content.array_records.items()}
        return cls(arrays, _joined(content.config_records))


@dataclass(frozen=True, kw_only=True)
class UpdateReader:
    """Puts a client's reply and what it was sent together to an update with what is known of the training behind it.

    Attributes:
        training: facts that are known beforehand; they go before what messages say.
        run_config: of the app.
    """

    training: TrainingFacts = field(default_factory=TrainingFacts)
    run_config: Mapping[str, Any] = field(default_factory=dict)

    def read(
        self,
        sent: SentWeights,
        reply: RecordDict,
        *,
        origin: Mapping[str, str],
        watched: Mapping[str, Any] | None = None,
    ) -> RecordedUpdate:
        """Return the update that a reply carries.

        Args:
            sent: what the client started from.
            reply: its answer.
            origin: where the update comes from, for reports.
            watched: what was seen of the optimizer (`OptimizerWatch.facts`).

        Raises:
            UnreadableError: the reply has more or less than one record of arrays, or one that does not fit what was
                sent, or seems to be a difference, or bytes beside it that nobody can audit.
        """
        key, ended = _only_record(reply)
        begun = _matching_record(sent, key, ended)
        before = {name: _tensor(name, begun[name], as_sent=array.dtype) for name, array in ended.items()}
        after = {name: _tensor(name, array, as_sent=array.dtype) for name, array in ended.items()}
        for name, value in after.items():
            if value.shape != before[name].shape:
                shapes = f"{tuple(before[name].shape)}, got {tuple(value.shape)}"
                raise UnreadableError(f"expected {name!r} in the shape that was sent, {shapes}")
        _refuse_differences(before, after)
        training, sources = self._facts(sent, reply, watched or {})
        said = {"facts": sources} if sources else {}
        return RecordedUpdate(before=before, after=after, training=training, origin={**origin, **said})

    def _facts(self, sent: SentWeights, reply: RecordDict, watched: Mapping[str, Any]) -> tuple[TrainingFacts, str]:
        """Return the facts of training, and where each comes from, in words."""
        given = {f.name: getattr(self.training, f.name) for f in fields(TrainingFacts)}
        examples = _count(_look_up(_joined(reply.metric_records), EXAMPLES))
        sources: list[tuple[str, Mapping[str, Any]]] = [
            ("given", _only_known(given)),
            ("seen of the optimizer", watched),
            ("message", _facts_of(sent.config)),
            ("run config", _facts_of(self.run_config)),
            ("metrics", {} if examples is None else {"examples": examples}),
        ]
        found: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for place, facts in sources:
            settled = "optimizer" in found
            for name, value in facts.items():
                if name not in found and not (name in OPTIMIZER_FACTS and settled):
                    found[name], origins[name] = value, place
        if found.get("batch_size") and found.get("examples"):
            found["batch_size"] = min(found["batch_size"], found["examples"])
        if _look_up({**self.run_config, **sent.config}, PROXIMAL) and found.get("steps") != 1:
            found["optimizer"], origins["optimizer"] = None, "not plain: FedProx"
        by_place = {
            place: [name for name in found if origins[name] == place] for place in dict.fromkeys(origins.values())
        }
        return TrainingFacts(**found), "; ".join(f"{place}: {', '.join(names)}" for place, names in by_place.items())


def round_of(message: Message) -> str:
    """Return the number of the server's round as text, or "" where the message does not say."""
    found = _look_up(_joined(message.content.config_records), ROUNDS)
    return str(message.metadata.group_id or "") if found is None else str(found)


def with_arrays(reply: RecordDict, recorded: RecordedUpdate, after: Mapping[str, Tensor]) -> None:
    """Replace the arrays of a reply by others, each in the type of numbers that it had; those that stay are kept."""
    key, record = _only_record(reply)
    arrays = {}
    for name, array in record.items():
        same = after[name] is recorded.after[name] or torch.equal(after[name], recorded.after[name])
        arrays[name] = array if same else Array(after[name].detach().numpy().astype(array.numpy().dtype))
    reply[key] = ArrayRecord(arrays)


def carries_numbers(reply: RecordDict) -> bool:
    """Return whether a reply has arrays, or bytes that may be arrays."""
    return bool(reply.array_records) or bool(_places_of_bytes(reply))


def _places_of_bytes(reply: RecordDict) -> list[str]:
    """Return the names of all config entries that are bytes, or lists of them."""
    entries = [entry for record in reply.config_records.values() for entry in record.items()]
    return [
        key
        for key, value in entries
        if isinstance(value, bytes) or (isinstance(value, list) and any(isinstance(one, bytes) for one in value))
    ]


def _only_record(reply: RecordDict) -> tuple[str, ArrayRecord]:
    records = reply.array_records
    if len(records) != 1:
        raise UnreadableError(
            f"expected a reply with one record of arrays, got {len(records)} ({', '.join(records) or 'none'}): only "
            "one can be audited as an update"
        )
    if held := _places_of_bytes(reply):
        raise UnreadableError(f"expected a reply without bytes, got some under {held[0]!r}, which can't be audited")
    return next(iter(records.items()))


def _matching_record(sent: SentWeights, key: str, after: ArrayRecord) -> Mapping[str, Array]:
    """Return the arrays that were sent and that the reply's belong to."""
    if not sent.arrays:
        raise UnreadableError("expected weights in the message that is replied to, got none: nothing to compare with")
    candidates = [record for record in sent.arrays.values() if record.keys() >= after.keys()]
    before = sent.arrays[key] if key in sent.arrays else candidates[0] if len(candidates) == 1 else None
    if before is None:
        raise UnreadableError(
            f"expected one record among those sent that the reply's {key!r} belongs to, got {', '.join(sent.arrays)}"
        )
    if strange := [name for name in after if name not in before]:
        raise UnreadableError(f"expected arrays that were sent, too, got {strange[0]!r} only in the reply")
    return before


def _tensor(name: str, array: Array, as_sent: str) -> Tensor:
    """Return an array as a tensor; one of float64 in float32 where that is what comes back.

    Strategies of Flower that step by NumPy send float64, which a network of float32 rounds when it is loaded.
    """
    try:
        found = torch.from_numpy(np.array(array.numpy()))
    except (TypeError, ValueError) as error:
        raise UnreadableError(f"expected numbers under {name!r}, got an array that can't be read: {error}") from error
    return found.float() if found.dtype == torch.float64 and as_sent == "float32" else found


def _refuse_differences(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse arrays that are no weights sent and then trained: the difference of a difference would show nothing."""
    sent, kept = _product(before, before), _product(before, after)
    if kept < LEAST_SHARE * sent:
        raise UnreadableError(
            f"expected weights in the reply, got arrays that hold {kept / sent:.3g} times what was sent: they seem to "
            "be differences or gradients; send weights, as Flower's strategies average them"
        )


def _product(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the inner product of two sets of arrays."""
    products = [
        (value.double() * second[name].double()).sum() for name, value in first.items() if value.is_floating_point()
    ]
    return float(torch.stack(products).sum()) if products else 0.0


def _joined(records: Mapping[str, ConfigRecord] | Mapping[str, MetricRecord]) -> dict[str, Any]:
    """Return the entries of all records, by name; of equal names that of the first record."""
    found: dict[str, Any] = {}
    for record in records.values():
        for key, value in record.items():
            found.setdefault(key, value)
    return found


def _look_up(entries: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return what the first of some names stands for, hyphens or underscores; None where there is none of them."""
    known = {str(key).lower().replace("_", "-"): value for key, value in entries.items()}
    return next((known[name] for name in names if name in known), None)


def _facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a config states, as far as their values can be such."""
    found = {fact: _look_up(config, names) for fact, names in CONFIG_NAMES.items()}
    facts: dict[str, Any] = {}
    for name, value in found.items():
        if name == "optimizer" and str(value).lower() in OPTIMIZERS:
            facts[name] = str(value).lower()
        elif name != "optimizer" and isinstance(value, int | float) and value >= 0:
            facts[name] = float(value) if name in {"lr", "momentum", "weight_decay"} else int(value)
    return facts


def _count(said: Any) -> int | None:
    """Return a number of examples; None where what is said is none."""
    if not isinstance(said, int | float) or not 1 <= said < math.inf:
        return None
    return int(said)


def _only_known(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts that are stated; those of an optimizer only together with it."""
    stated = {name: value for name, value in facts.items() if value is not None}
    return {name: value for name, value in stated.items() if name not in OPTIMIZER_FACTS or "optimizer" in stated}
