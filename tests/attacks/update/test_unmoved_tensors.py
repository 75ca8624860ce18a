"""Tensors of an update that did not move."""

import torch
from support import worlds

from attacks.update.unmoved_tensors import without_unmoved
from fl.methods.fedavg import FedAvg
from fl.tensors import dense
from fl.view import ServerView


def view_with(still: set[str]) -> ServerView:
    view, _ = worlds.federation(worlds.one_step(FedAvg.example()), rounds=0).observe(0)
    for name in view.update:
        if name in still:
            dense(view.update[name]).zero_()
    return view


def test_tensors_that_did_not_move_are_left_out() -> None:
    names = list(view_with(set()).update)
    assert list(without_unmoved(view_with({names[0]})).update) == names[1:]


def test_where_all_or_none_moved_the_view_is_as_it_was() -> None:
    names = set(view_with(set()).update)
    for view in (view_with(set()), view_with(names)):
        assert without_unmoved(view) is view
    assert not any(torch.any(dense(value)) for value in view.update.values())
