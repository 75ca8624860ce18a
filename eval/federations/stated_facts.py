"""What a screening takes for true of a client's training, in words for its notes."""

from __future__ import annotations

from attacks.network.normalization_modes import normalization_mode
from eval.audit.recorded_update import TrainingFacts
from eval.audit.stated_training import say_mode, say_what_it_rests_on
from eval.io.text import join_words
from fl.methods.fedavg import FedAvg
from fl.view import ServerView


def assumptions(facts: TrainingFacts, knows_optimizer: bool) -> list[str]:
    """Return what a screening has to assume where the facts of training are not known."""
    assumed = []
    if not knows_optimizer:
        assumed.append(
            f"how the client trained is not known, so that little can be confirmed: say {unknown_facts(facts)}"
        )
    if facts.examples is None and facts.batch_size is None:
        assumed.append("the number of examples is not known; taken for one")
    return assumed


def unknown_facts(facts: TrainingFacts) -> str:
    """Return the names of the facts that tell how a client trained and that are not known, in words."""
    length = facts.steps if facts.steps is not None else facts.epochs
    known = {"optimizer": facts.optimizer, "steps": length, "lr": facts.lr}
    return join_words([name for name, value in known.items() if value is None])


def rests_on(facts: TrainingFacts, view: ServerView) -> list[str]:
    """Return what that nothing is shown rests on: facts that the update neither bears out nor contradicts."""
    length = {"steps": facts.steps} if facts.steps is not None else {"epochs": facts.epochs}
    method = view.method
    used = {
        "loss": view.task.loss.name,
        "optimizer": facts.optimizer,
        "lr": facts.lr,
        "momentum": facts.momentum,
        "weight_decay": method.weight_decay if isinstance(method, FedAvg) else facts.weight_decay,
        **length,
        "examples": facts.examples,
        "batch_size": facts.batch_size,
        **say_mode(normalization_mode(view)),
    }
    said = [say_what_it_rests_on(used)]
    if facts.lr is None and next(iter(length.values())) not in {1, None}:
        said.append("several steps of unknown sizes were attacked as one, and as steps of one size; of such say lr")
    return said
