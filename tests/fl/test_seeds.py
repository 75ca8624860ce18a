"""Named streams: one for every name, and how far that goes."""

from __future__ import annotations

import torch

from fl.seeds import derive_seed, stream


def test_seeds_differ_by_every_key() -> None:
    keys = [(seed, kind, client, at) for seed in (0, 1) for kind in "ab" for client in range(50) for at in range(100)]
    assert len({derive_seed(*key) for key in keys}) == len(keys) == 20_000  # type: ignore[arg-type]
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")
    assert derive_seed(0, 1, 11) != derive_seed(0, 11, 1)
    assert all(0 <= derive_seed(*key) < 2**63 for key in keys[:100])  # type: ignore[arg-type]


def test_streams_never_change_and_leave_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    drawn = torch.randint(1000, (4,), generator=stream(0, "order", 3, 7)).tolist()
    assert drawn == [78, 410, 404, 35]
    assert torch.equal(torch.rand(9, generator=stream(5)), torch.rand(9, generator=stream(5)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_keeps_32_bits_of_its_seed() -> None:
    """What `docs/sharp-edges.md` says of collisions; a torch that keeps more makes it wrong."""
    first, second = (torch.Generator().manual_seed(seed) for seed in (12345, 12345 + 2**32))
    assert torch.equal(torch.rand(99, generator=first), torch.rand(99, generator=second))
