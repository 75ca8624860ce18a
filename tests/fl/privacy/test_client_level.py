import pytest

from fl.privacy.accounting import Charge, gaussian_epsilon
from fl.privacy.client_level import state_client_level

SAID = {"clip": 2.0, "delta": 1e-5, "mode": "local", "released": "the client's update", "trusted": "nobody else"}


def test_rounds_add_up_like_one_release_of_less_noise():
    claim = state_client_level(Charge(3.0, 1.0, 4), **SAID)
    assert claim.epsilon == pytest.approx(gaussian_epsilon(4**0.5 / 3.0, 1e-5))
    assert claim.epsilon <= claim.epsilon_rdp
    assert (claim.noise_multiplier, claim.clip, claim.steps, claim.reason) == (3.0, 2.0, 4, "")
    assert "client-level" in claim.sentence()


@pytest.mark.parametrize(
    ("noise", "reason", "said"), [(0.0, "", "no noise is added"), (3.0, "it is seen", "it is seen")]
)
def test_nothing_is_claimed_without_noise_or_against_a_reason(noise: float, reason: str, said: str):
    claim = state_client_level(Charge(noise, 1.0, 4), reason=reason, **SAID)
    assert (claim.epsilon, claim.epsilon_rdp, claim.reason) == (None, None, said)
