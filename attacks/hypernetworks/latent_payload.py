"""The image behind a latent vector that a client sent beside its update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from attacks.gradient_matching.engine.minimization import describe_cut
from attacks.gradient_matching.engine.regularizers import total_variation
from attacks.search_control import SearchControl, SearchMonitor
from fl.defense import overrides
from fl.methods.hfedf_latent import LATENT, PREFIX
from fl.models.hfedf_autoencoder import Autoencoder
from fl.ranges import CountFrom0, StepSize, Weight
from fl.tensors import dense
from fl.view import ServerView


@attacks.register("latent-payload")
@dataclass(frozen=True, kw_only=True)
class LatentPayload(Attack):
    """Feature inversion of hFedF's mean latent vector: ours, after Mahendran, Vedaldi (CVPR 2015, Eq. 2).

    The server holds the autoencoder and receives `v - mean E(x)` (`hfedf-latent`), so it knows the mean latent vector z
    itself. Its decoder already makes an image of z; from there it searches for the image x with E(x) = z, by Adam on
    |E(x) - z|^2 / |z - E(gray)|^2 + tv * TV(x). Of one image that is the image, as far as so few numbers tell; of
    several it is one image with their mean latent vector, returned for each of them.

    A known defense that clips or prunes the latent vector, or sends its signs, hides it. Noise and rounding do not:
    the image is then that of what came.

    Labels are not looked for. The update of the network itself is left aside: `ig` predicts both.

    Threat model: an honest-but-curious server, which holds the autoencoder as every client does and receives a
    client's mean latent vector.

    Attributes:
        iterations: of Adam; 0 returns what the decoder makes.
        lr: its step size, in pixels.
        tv_weight: weight of total variation, in units of the model's normalization as for `ig`.
    """

    images_only: ClassVar[bool] = True
    plain: ClassVar[str] = "finds an image whose short code is the one that the client sent."

    former_names: ClassVar[Mapping[str, str]] = {"tv": "tv_weight"}

    iterations: CountFrom0 = 1000
    lr: StepSize = 0.02
    tv_weight: Weight = 1e-2

    def __post_init__(self) -> None:
        if self.iterations < 0:
            raise ValueError(f"expected iterations >= 0, got {self.iterations}")
        for name in ("lr", "tv_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} >= 0 and finite, got {getattr(self, name)}")

    @classmethod
    def example(cls) -> LatentPayload:
        """Return a few steps."""
        return cls(iterations=5)

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        """Return one image for each view, as many times as the view has images; the seeds change nothing."""
        return self.run_controlled(views, seeds, SearchControl())

    def run_controlled(self, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl) -> list[Result]:
        """Attack several views within what `control` allows; without time left, the latent vector is only decoded."""
        monitor = SearchMonitor(control, len(views), self.iterations)
        single = map(self.single_client_view, views)
        return [view if isinstance(view, NotApplicable) else self._invert(view, monitor) for view in single]

    def _invert(self, view: ServerView, monitor: SearchMonitor) -> Reconstruction | NotApplicable:
        """Return one image, as many times as the view has images."""
        if LATENT not in view.update or not any(name.startswith(PREFIX) for name in view.shared):
            return NotApplicable("the client sends no latent vector of its images")
        if view.scale_unknown:
            return NotApplicable("the unit of the latent vector is lost")
        if not _latent_moves(view):
            return NotApplicable("no latent vector is sent while the autoencoder is trained")
        if (reason := _defense_obstacle(view)) is not None:
            return NotApplicable(reason)
        wanted = dense(view.shared[LATENT]) - dense(view.update[LATENT])
        encoder = _encoder(view, len(wanted))
        gray = wanted.new_full((1, *view.task.input_shape), 0.5)
        with torch.no_grad():
            image, scale = encoder.decoder(wanted[None]), (encoder.encoder(gray)[0] - wanted).square().sum()
        found, history, cut_short = self._search(
            encoder, wanted, scale, image, wanted.new_tensor(view.task.std), monitor
        )
        count = view.batch_size or 1
        return Reconstruction(
            found.expand(count, *found.shape[1:]).clone(),
            None,
            history[-1],
            tuple(history),
            note=cut_short,
            cut_short=cut_short,
        )

    def _search(
        self, encoder: Autoencoder, wanted: Tensor, scale: Tensor, start: Tensor, std: Tensor, monitor: SearchMonitor
    ) -> tuple[Tensor, list[float], str]:
        """Return the best image (1, C, H, W) met on the way, the objective, coarsely, and what cut the search short."""

        def objective(image: Tensor) -> Tensor:
            apart = (encoder.encoder(image)[0] - wanted).square().sum() / scale.clamp_min(torch.finfo(scale.dtype).tiny)
            return apart + self.tv_weight * total_variation(image, std)

        image = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([image], lr=self.lr)
        best, found, history = float(objective(start)), start, [float(objective(start))]
        stopped = monitor.begin_batch() if self.iterations else ""
        for i in range(self.iterations):
            if stopped := stopped or monitor.after(i):
                stopped = describe_cut(i, self.iterations, stopped)
                break
            optimizer.zero_grad()
            objective(image).backward()
            optimizer.step()
            with torch.no_grad():
                image.clamp_(0, 1)
                value = float(objective(image))
            if value < best:
                best, found = value, image.detach().clone()
            if i % max(1, self.iterations // 20) == 0:
                history.append(value)
        return found, [*history, best], stopped


def _latent_moves(view: ServerView) -> bool:
    """Return whether the latent vector moves in this round."""
    return any(LATENT in phase.assign(view.shared) for phase in view.method.phases(view.client.task, view.round))


def _defense_obstacle(view: ServerView) -> str | None:
    """Return why a known defense does not let the latent vector through as it is, up to noise and rounding; or None."""
    defense, sent = view.client.defense, dense(view.update[LATENT])
    if overrides(defense, "gradient"):
        return f"the defense {view.defense.name} changes the step that puts the latent vector in the update"
    probe = 2 * torch.where(sent != 0, sent, sent.abs().max().clamp_min(1.0))  # what is clipped comes back shorter
    passed = dense(defense.transmit_known_part({LATENT: probe}, view.update)[LATENT])
    if bool(((passed - probe).abs() > 1e-3 * probe.abs()).any()):
        return f"the defense {view.defense.name} has shortened or left out the latent vector: its own size is lost"
    return None


def _encoder(view: ServerView, size: int) -> Autoencoder:
    with torch.device("meta"):  # shapes only: nothing is drawn from the global generator
        autoencoder = Autoencoder(view.task.input_shape, size)
    autoencoder.to_empty(device=view.device).to(view.dtype)
    state = {name.removeprefix(PREFIX): dense(v) for name, v in view.shared.items() if name.startswith(PREFIX)}
    autoencoder.load_state_dict(state, strict=True)
    return autoencoder.requires_grad_(False)
