"""What a server would have seen if a guess were true: the local rule, differentiable in everything it does not know."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from fl.aggregated_view import member_view, sequential_order, weighted_update
from fl.client import Client, LocalInput, LocalTraining, gather_batches, local_update
from fl.gradient import Derivative, autograd_derivative
from fl.local.hook_results import expect_tensors
from fl.tensors import Payloads, Tensors, dense
from fl.types import Candidate
from fl.view import ServerView


def predict(
    view: ServerView,
    candidate: Candidate,
    *,
    derivative: Derivative = autograd_derivative,
    client: Client | None = None,
    defended: bool = True,
    use_search_gradient: bool = False,
) -> Tensors:
    """Return what the server would have observed if `candidate` were the truth: differentiable in all its tensors.

    Everything follows from the view's own settings. Noise that the defense draws afresh is left out.

    Args:
        view: what the server knows.
        candidate: the guess.
        derivative: how gradients are taken; `func_derivative` under `vmap`.
        client: the view's local rule where the caller has built it already; the view builds its own otherwise.
        defended: whether a known defense changes the finished update; what it does during training it always does.
        use_search_gradient: whether the defense's `search_gradient` stands for its `gradient`, as in a search.

    Returns:
        By the names of `view.update`.

    Raises:
        ValueError: if the candidate lacks a private tensor, has one of a wrong shape, or nothing tells the schedule.
    """
    _check_candidate(view, candidate)
    client = client or view.client
    order = candidate.order or view.order or sequential_order(view, candidate.inputs.shape[-4])
    if order is None:
        raise ValueError("expected a view that knows the local schedule, or a candidate with an order")
    candidate = replace(candidate, order=order, draws=candidate.draws or view.draws)
    send = partial(
        _predict_client,
        derivative=derivative,
        client=client,
        defended=defended,
        use_search_gradient=use_search_gradient,
    )
    if view.parts:
        each = [send(*member_view(view, candidate, i)) for i in range(len(view.parts))]
        sent = weighted_update(each, [part.weight for part in view.parts])
    else:
        sent = send(view, candidate)
    return {name: value for name, value in sent.items() if name in view.update}


def _predict_client(
    view: ServerView,
    candidate: Candidate,
    *,
    derivative: Derivative,
    client: Client,
    defended: bool,
    use_search_gradient: bool,
) -> Tensors:
    """Return what one client sends."""
    mine = client.task.buffers
    assert candidate.order is not None
    params = {k: v for k, v in candidate.private.items() if "/" not in k and k not in mine}
    kept = {k: v for k, v in candidate.private.items() if k in mine}
    memory: Payloads = {}
    guessed_draws: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, value in candidate.private.items():
        kind, *path = name.split("/", 3)
        if kind == "memory":
            memory.setdefault(path[0], {})["/".join(path[1:])] = value
        elif kind == "draws":
            guessed_draws.setdefault((int(path[0]), int(path[1])), {})[path[2]] = dense(value)
    if not memory and client.method.initial_memory_is_known:
        memory = client.method.init_memory({**view.shared, **params}, client.task)
    start = LocalInput(
        shared=view.shared,
        private=params,
        buffers={**mine, **view.buffers, **kept},  # type: ignore[dict-item]
        received=view.received,
        memory=memory,
        round=view.round,
    )
    training = LocalTraining(
        draws=candidate.draws,
        guessed_draws=guessed_draws,
        derivative=derivative,
        use_search_gradient=use_search_gradient,
    )
    sent = local_update(
        client, start, gather_batches(candidate.inputs, candidate.labels, candidate.order), training
    ).sent()
    if not (defended and view.threat.knows_defense):
        return sent
    return expect_tensors(view.defense.name, "transform_update", view.defense.transform_update(sent, None), sent)


def _check_candidate(view: ServerView, candidate: Candidate) -> None:
    for name, shape in view.private.items():
        if name not in candidate.private:
            raise ValueError(f"expected a guess of the private tensor {name!r} {tuple(shape)}, got none")
        got = candidate.private[name].shape
        if tuple(got) != tuple(shape):
            raise ValueError(f"expected {name!r} of shape {tuple(shape)}, got {tuple(got)}")
