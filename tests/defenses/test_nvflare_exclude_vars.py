from __future__ import annotations

from typing import Any

import pytest
import torch
from support import worlds
from support.frameworks import nvflare_filtered, updates

from attacks.base import NotApplicable, Reconstruction, build
from defenses.clip import Clip
from defenses.compose import Chain
from defenses.nvflare_exclude_vars import NVFlareExcludeVars
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.tensors import dense


def test_names_and_patterns() -> None:
    listed, matched = NVFlareExcludeVars(names=("fc.bias", "nothing")), NVFlareExcludeVars(pattern=r"fc\.|^conv$")
    assert [listed.withholds(name) for name in ("fc.bias", "fc.bias2", "my.fc.bias")] == [True, False, False]
    assert [matched.withholds(name) for name in ("fc.bias", "my.fc.x", "conv.weight")] == [True, True, False]
    assert not NVFlareExcludeVars().withholds("fc.bias")  # NVFlare's default leaves out nothing


def test_the_server_has_no_update_of_what_is_not_sent_and_keeps_its_own() -> None:
    for defense in (NVFlareExcludeVars(pattern=r"^head\."), Chain(parts=(Clip(), NVFlareExcludeVars(pattern="head")))):
        run = worlds.federation(FedAvg.example(), defense, rounds=0)
        before = {name: dense(value).clone() for name, value in run.server.shared.items()}
        view, _ = run.observe(0)
        assert set(view.shared) - set(view.update) == {n for n in before if n.startswith("head.")} != set()
        run.step(evaluate=False)
        moved = {name for name, value in before.items() if not torch.equal(value, dense(run.server.shared[name]))}
        assert moved == set(view.update)
        assert set(defense.release({n: v for n, v in before.items()})) == set(view.update)


def test_what_is_not_sent_is_not_asked_of_a_captured_update() -> None:
    task = worlds.flat()
    update = {name: torch.randn(value.shape, dtype=torch.float64) for name, value in task.parameters.items()}
    names = [name for name in update if name.endswith("bias")]
    part = {name: value for name, value in update.items() if name not in names}
    settings: dict[str, Any] = {"input_shape": (1, 8, 8), "num_classes": 3, "defense": NVFlareExcludeVars.example()}
    assert from_update(task.model, part, **settings).update.keys() == part.keys()
    with pytest.raises(ValueError, match="not sent under the defense nvflare-exclude-vars"):
        from_update(task.model, update, **settings)


def test_attacks_say_that_it_was_not_sent() -> None:
    first = next(name for name in worlds.flat().parameters if name.endswith("weight"))
    run = worlds.federation(worlds.one_step(FedAvg.example()), NVFlareExcludeVars(names=(first,)), worlds.flat())
    view, _ = run.observe(0, data=worlds.images(1, "victim"))
    result = build("rconv")(view)
    assert isinstance(result, NotApplicable)
    assert "was not sent" in result.reason


def test_a_first_layer_that_is_not_sent_hides_no_picture_that_its_outputs_tell() -> None:
    """The classifier's update tells 200 features, open ones of which determine the 64 pixels."""
    first = next(name for name in worlds.flat().parameters if name.endswith("weight"))
    run = worlds.federation(worlds.one_step(FedAvg.example()), NVFlareExcludeVars(names=(first,)), worlds.flat())
    images = worlds.images(1, "victim")
    result = build("cascade")(run.observe(0, data=images)[0])
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert torch.allclose(result.inputs, images.inputs, atol=1e-6)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="got both"):
        NVFlareExcludeVars(names=("a",), pattern="b")
    with pytest.raises(ValueError, match="regular expression"):
        NVFlareExcludeVars(pattern="(")


@pytest.mark.parametrize(("names", "pattern"), [(("fc.bias", "no"), ""), ((), "fc"), ((), "^weight"), ((), "")])
def test_it_leaves_out_what_nvflare_leaves_out(names: tuple[str, ...], pattern: str) -> None:
    own = pytest.importorskip("nvflare.app_common.filters.exclude_vars").ExcludeVars(list(names) or pattern or None)
    for update in updates(3):
        theirs = nvflare_filtered(own, update)
        ours = NVFlareExcludeVars(names=names, pattern=pattern).release(dict(update))
        assert theirs.keys() == ours.keys()
