"""A fast copy is what `copy.deepcopy` gives."""

import copy
import gc
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call, jvp, vmap

from fl.runtime.interprocess_packing import pack, unpack, unportable_reason
from fl.runtime.module_copies import copy_model, deep_copy


class Holder(nn.Module):
    """Holds collections of its own, of which two names are of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(2, 2), nn.ReLU()
        self.tied = self.layer
        self.seen: dict[str, int] = {}
        self.alike = self.seen
        self.filled, self.kinds = {"a": [1]}, OrderedDict[str, int]()
        self.layer.register_forward_hook(lambda *_: None)


def test_a_copy_shares_nothing_and_ties_what_was_tied() -> None:
    model = Holder().train(False)
    for made in (deep_copy(model), copy.deepcopy(model)):
        assert not made.training
        assert made.tied is made.layer is not model.layer
        assert made.alike is made.seen is not model.seen
        assert made.filled == model.filled
        assert made.filled["a"] is not model.filled["a"]
        assert type(made.kinds) is OrderedDict
        assert len(made.layer._forward_hooks) == 1
        assert made.again._forward_hooks is not model.again._forward_hooks
        made.again.register_forward_hook(lambda *_: None)
        assert not model.again._forward_hooks
        assert all(torch.equal(x, y) for x, y in zip(made.parameters(), model.parameters(), strict=True))
        assert not {x.data_ptr() for x in made.parameters()} & {x.data_ptr() for x in model.parameters()}


class Keeping(nn.Module):
    """Keeps what it computed, for a part that reads it and for its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.history, self.by_name = nn.Linear(2, 2), None, [], {"none": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        self.history.append(self.last)
        self.by_name["last"] = self.last
        self.new = self.last
        return self.last


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Keeping()

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        out: Tensor = self.body.last + self.body.history[-1]
        return out


def test_a_copy_forgets_what_it_computed_and_can_be_copied_again() -> None:
    ran = Reading()
    ran(torch.ones(1, 2))
    assert len(copy_model(ran).body.history) == 1
    made = copy_model(Reading())
    for model in (made, copy.deepcopy(made)):
        for _ in range(2):
            assert model(torch.ones(1, 2)).requires_grad
        again = deep_copy(model)
        assert (again.body.last, again.body.history, again.body.by_name) == (None, [], {"none": 0})
        assert not hasattr(again.body, "new")


class KeepingElsewhere(nn.Module):
    """Keeps what it computed under a private name, in objects, and in a layer of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.box, self.turned = nn.Linear(2, 2), SimpleNamespace(count=3), SimpleNamespace()
        self.recent = deque[Tensor](maxlen=2)
        self.layer.register_forward_hook(lambda layer, _, output: setattr(layer, "kept", output))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self._features, self.box.features, self.turned = out, {"last": (out,)}, out
        self.law = Normal(out, 1.0, validate_args=False)
        self.recent.append(out)
        return out


def test_a_copy_forgets_what_it_keeps_under_private_names_in_objects_and_in_layers() -> None:
    ran = KeepingElsewhere()
    ran(torch.ones(1, 2))
    assert torch.equal(copy_model(ran)._features, ran._features)
    made = copy_model(KeepingElsewhere())
    for model in (made, deep_copy(made)):
        assert model(torch.ones(1, 2)).requires_grad
        again = deep_copy(model)
        assert (vars(again.box), again.turned, again.recent) == ({"count": 3}, SimpleNamespace(), deque())
        assert not {"_features", "law", "kept"} & {*vars(again), *vars(again.layer)}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch's own use of it
def test_a_copy_forgets_what_it_computed_under_vmap_and_jvp() -> None:
    weights, x = dict(Keeping().named_parameters()), torch.ones(2, 1, 2)
    for run in (vmap, lambda function: lambda x: jvp(function, (x[0],), (x[1],))):
        model = copy_model(Keeping())
        run(lambda x, model=model: functional_call(model, weights, (x,)))(x)
        assert deep_copy(model).last is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_a_copy_that_ran_is_freed_at_once():
    """Those of large networks take gigabytes, which the collector of cycles does not see."""
    made = copy_model(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    made(torch.zeros(1, 2))
    copied = deep_copy(made)
    copied(torch.zeros(1, 2))
    left = [weakref.ref(made), weakref.ref(copied)]
    gc.disable()
    try:
        del made, copied
        assert [one() for one in left] == [None, None]
    finally:
        gc.enable()


def test_networks_in_torchscript_are_copied_as_they_are_so_that_they_can_be_refused_by_name() -> None:
    x = torch.ones(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of TorchScript itself
        script = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    for model in (script, nn.Sequential(script, nn.Linear(2, 2))):
        assert torch.equal(copy_model(model)(x), model(x))


def test_copies_can_be_sent_to_other_processes_and_forget_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old `weight_norm` keeps what it computed in the layer
        normed = nn.utils.weight_norm(nn.Linear(2, 2))
    for model in (Reading(), nn.Sequential(normed)):
        made = copy_model(model)
        assert unportable_reason(made) == ""
        sent = unpack(pack(made))
        assert torch.equal(sent(torch.ones(1, 2)), made(torch.ones(1, 2)))
        deep_copy(sent)  # fails where it still holds what it computed


def test_what_can_not_be_copied_is_named():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].lock = threading.Lock()
    with pytest.raises(ValueError, match=r"which fails for 'lock' in '0' \(lock\): cannot pickle .* may stay outside"):
        copy_model(model)
