"""What NVFlare's data exchange objects carry, read and written without NVFlare."""

import numpy as np
import pytest
import torch

from eval.federations.dxo_payload import (
    ReceivedWeights,
    read_tensors,
    weight_of_withheld,
    withhold_meta,
    write_like,
)
from eval.federations.reply_checks import UnreadableError


class OnDisk:
    """A tensor as NVFlare leaves it on the disk."""

    def materialize(self) -> torch.Tensor:
        return torch.tensor([7.0])


def test_arrays_tensors_and_numbers_are_read_as_copies():
    array, tensor = np.array([1.5, 2.5], np.float16), torch.tensor([[1.0]], requires_grad=True)
    read = read_tensors({"a": array, "t": tensor, "n": 3, "l": [[1, 2]], "d": OnDisk()})
    array += 1
    with torch.no_grad():
        tensor += 1
    assert read["a"].tolist() == [1.5, 2.5]
    assert read["a"].dtype == torch.float16
    assert read["t"].tolist() == [[1.0]]
    assert not read["t"].requires_grad
    assert (read["n"].item(), read["l"].tolist(), read["d"].tolist()) == (3, [[1, 2]], [7.0])


@pytest.mark.parametrize("value", [object(), "text", None, [[1], [1, 2]], np.array(["a"]), np.array([1j])])
def test_other_things_are_no_arrays(value: object):
    with pytest.raises(UnreadableError, match=f"expected an array under 'w', got {type(value).__name__}"):
        read_tensors({"w": value})


def test_tensors_are_written_as_the_pattern_has_them():
    tensors = {"a": torch.tensor([1.25]), "t": torch.tensor([2.0]), "d": torch.tensor([3.0]), "left": torch.zeros(1)}
    patterns = {"a": np.zeros(1, np.float64), "t": torch.zeros(1, dtype=torch.bfloat16), "d": OnDisk()}
    written = write_like(tensors, patterns)
    assert written.keys() == patterns.keys()
    assert isinstance(written["a"], np.ndarray)
    assert (written["a"].dtype, written["t"].dtype) == (np.float64, torch.bfloat16)
    assert written["d"].tolist() == [3.0]
    tensors["d"] += 1
    assert written["d"].tolist() == [3.0], "a copy"


def test_received_weights_belong_to_a_site_and_a_task():
    memory = ReceivedWeights()
    memory.remember("one", "t1", {"w": np.ones(2)}, 3)
    memory.remember("two", "t2", {"w": np.zeros(2)}, 3)
    assert memory.take("one", "t2") is None
    assert memory.take("three", "t1") is None
    found = memory.take("one", "t1")
    assert found is not None
    assert (found.weights["w"].tolist(), found.round) == ([1, 1], 3)
    assert memory.take("one", "t1") is None, "it is forgotten once it was used"
    assert memory.take("two", "t2") is not None


def test_unreadable_task_replaces_the_earlier_one():
    memory = ReceivedWeights()
    memory.remember("one", "t1", {"w": np.ones(2)}, 3)
    with pytest.raises(UnreadableError):
        memory.remember("one", "t2", {"w": object()}, 4)
    assert memory.take("one", "t1") is None


def test_sites_that_were_sent_the_same_share_one_copy():
    memory, array = ReceivedWeights(), np.ones(2)
    for site in ("one", "two"):
        memory.remember(site, site, {"w": array}, 3)
    one, two = memory.take("one", "one"), memory.take("two", "two")
    assert one is two
    array += 1  # in place, as a server's optimizer may do between two rounds
    memory.remember("one", "next", {"w": array}, 4)
    later = memory.take("one", "next")
    assert later is not None
    assert later.weights["w"].tolist() == [2, 2]


def test_tasks_without_a_round_are_copied_each():
    memory, array = ReceivedWeights(), np.ones(2)
    for site in ("one", "two"):
        memory.remember(site, site, {"w": array}, None)
        array += 1
    two = memory.take("two", "two")
    assert two is not None
    assert two.weights["w"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("kind", "weight"), [(torch.float64, 2**-20), (torch.float32, 2**-20), (torch.float16, 1), (torch.bfloat16, 1)]
)
def test_withheld_update_counts_little_where_that_rounds_nothing(kind: torch.dtype, weight: float):
    assert weight_of_withheld({"w": torch.zeros(1, dtype=kind), "n": torch.zeros(1, dtype=torch.int64)}) == weight


def test_withheld_meta_has_plain_values_and_zeros():
    meta = {
        "steps": 3,
        "metrics": {"loss": 0.5, "curve": [1.0, np.float32(2)]},
        "variates": {"w": np.ones(2, np.float32), "t": torch.ones(1)},
        "blob": b"picture",
        "object": object(),
        "names": np.array(["a"]),
    }
    kept = withhold_meta(meta)
    assert kept.keys() == {"steps", "metrics", "variates"}
    assert kept["metrics"] == meta["metrics"]
    variates = kept["variates"]
    assert isinstance(variates, dict)
    assert variates["w"].dtype == np.float32
    assert not variates["w"].any()
    assert not variates["t"].any()


@pytest.mark.parametrize(
    "hidden",
    [
        [0.5] * 64,
        "0.123 " * 64,
        {"a" * 300: 1},
        2**4000,
        {str(i): 0.5 for i in range(64)},
    ],
    ids=["list", "text", "name", "whole number", "names"],
)
def test_withheld_meta_has_no_room_for_a_picture(hidden: object):
    kept = withhold_meta({"hidden": hidden, "steps": 3, "c": np.ones(2)})
    assert kept.keys() == {"steps", "c"}
    kept = withhold_meta({"c": {"w": np.ones(500), "hidden": hidden}, "steps": 3})
    assert kept.keys() == {"steps"}
    halves = withhold_meta({"a": [0.5] * 20, "b": [0.5] * 19})
    assert halves.keys() == {"b"}
