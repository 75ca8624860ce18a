"""What methods with differential privacy have in common: noise, batches, budget, and what may be said of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fl.client import LossGradient, client_loss_gradient
from fl.gradient import Gradient
from fl.local.sampling import PoissonPhase
from fl.method import Method, ServerState, Step
from fl.privacy.accounting import Accountant, Charge, calibrate_noise, costliest_charge
from fl.privacy.dp_sgd import NORM_STABILIZER, ClipTarget, Privatization
from fl.privacy.gaussian_noise import Noise, draw_key, fresh_key
from fl.privacy.private_gradient import PrivateGradient
from fl.privacy_statement import PrivacyStatement
from fl.ranges import Count, CountFrom0, OpenShare, Positive, PositiveShare, Range, Weight
from fl.tensors import Tensors, dense, norm, scale_tensors, zeros
from fl.types import Batch, Phase, Scope, Task, Upload

NOISE_KEY = "noise"
"""Name of the key of a step's noise among its draws."""
PARTICIPATION, SERVER_NOISE = "participation", "server-noise"
"""The rounds that everybody has seen each client take part in, and the key of the server's noise."""


@dataclass(frozen=True, kw_only=True)
class PrivateMethod(Method):
    """Trains another method by DP-SGD (Abadi et al., CCS 2016): a class in front of that method's own.

    The key of a step's noise is drawn with the method's random numbers and recorded, so that a round can be replayed to
    the bit; an attacker, who does not know it, predicts without noise. `rate` and `local_steps`, on which the noise is
    calibrated, are fixed when the method is made: a copy with fewer steps, as an attacker observes, keeps its noise.

    Attributes:
        mode: "dp-joint": everything that moves, private tensors included, moves by noisy gradients only, so the
            guarantee holds for every record, against everybody else ("ISRL-DP", Lowy and Razaviyayn, ICLR 2023).
            "as-published": as the HyperFL authors run it (Guo et al., AAAI 2025): private tensors move without noise,
            batches are shuffled, but accounted as if drawn by Poisson sampling; no epsilon follows. "client-level":
            clients train without noise; a trusted server clips and noises their updates.
        epsilon: the budget of one client for all `rounds`, from which the noise follows. It holds for any number of
            images, but for Poisson sampling of clients that fit into a batch: these feed all they have in every step.
            What each client really has is what `privacy` says.
        noise_multiplier: standard deviation of the noise, in units of `clip`; takes the place of `epsilon`.
        delta: of the guarantee.
        clip: what one record moves the sum of gradients by at most (client-level: one client, the sum of updates).
        rounds: in which a client takes part at most. After them it trains no more and sends nothing
            (`exclusion_reason`).
        images: public number of images of a client, on which rate and steps are based, and what counts in the server's
            mean under Poisson sampling. None takes each client's own, which then is public, and needs
            `noise_multiplier`.
        rate: largest probability of an image to be in a step, on which the noise is calibrated; None is what the other
            settings come to: batch_size / images under Poisson sampling, else 1.
        local_steps: most noisy steps in a round that a record can be in, likewise. Batches that go round the images
            meet a record once an epoch; a number of `steps` meets those of a client that fits into a batch every time.
        accountant: "prv", or "rdp", which asks for 6 % more noise (and is what the HyperFL authors use).
        sampler: "poisson" draws every image by itself, with probability batch_size / images, and divides by batch_size;
            the others see every image once in an epoch, without amplification by sampling.
        noise_source: "seeded" draws noise from the experiment's seed; "secure" draws Poisson batches and keys from the
            operating system, and noise from the keys by a generator made for secrets (`fl.runtime.secure_rng`).

    Raises:
        ValueError: a setting out of range, no public number of images for a budget, or a higher rate or more steps than
            those on which the noise is calibrated.
    """

    clip_target: ClassVar[ClipTarget] = "weights"
    """What is clipped: gradients of the network's weights; what is pulled back from them stays private."""
    trains_private_tensors: ClassVar[bool] = False
    """Whether a client trains tensors that it keeps."""
    released: ClassVar[str] = "the gradient of all weights"

    former_names: ClassVar[Mapping[str, str]] = {"profile": "noise_source"}
    former_values: ClassVar[Mapping[str, Mapping[Any, Any]]] = {
        "noise_source": {"experiment": "seeded", "release": "secure"}
    }

    mode: Literal["dp-joint", "as-published", "client-level"] = "dp-joint"
    epsilon: Annotated[float, Range(0, 1000, above=True)] | None = 4.0
    noise_multiplier: Weight | None = None
    delta: OpenShare = 1e-5
    clip: Positive = 0.04
    rounds: Annotated[int, Range(1, 10**9)] = 200
    images: Count | None = 600
    rate: PositiveShare | None = None
    local_steps: Count | None = None
    accountant: Accountant = "prv"
    sampler: Literal["poisson", "shuffle", "sequential"] = "poisson"
    noise_source: Literal["seeded", "secure"] = "seeded"
    batch_size: Count | None = 50
    epochs: CountFrom0 | None = 5
    steps: Count | None = None

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            object.__setattr__(self, "epsilon", None)
        if self.mode != "dp-joint" and self.sampler == "poisson":
            object.__setattr__(self, "sampler", "shuffle")
        self._check()
        if self.images is not None:
            rate, steps = self._noise_exposure(
                self.images if self._is_poisson_accounted else 1
            )  # the clients that are charged most
            for key, needed, asked in (("rate", rate, "batch_size"), ("local_steps", steps, "epochs or steps")):
                if getattr(self, key) is None:
                    object.__setattr__(self, key, needed)
                elif self._is_calibrated and needed > getattr(self, key):
                    raise ValueError(
                        f"expected {key} of at most {getattr(self, key):g}, on which the noise for epsilon "
                        f"{self.epsilon:g} is calibrated, got {needed:g} from {asked}; lower {asked}, or leave {key} "
                        f"out to calibrate anew; an observed round can't take more than training"
                    )
        if (above := getattr(super(), "__post_init__", None)) is not None:
            above()

    def _check(self) -> None:
        for key in ("epsilon", "clip", "rounds", "images"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"expected {key} > 0, got {value}")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"expected noise_multiplier >= 0, got {self.noise_multiplier}")
        if not 0 < self.delta < 1:
            raise ValueError(f"expected delta in (0, 1), got {self.delta}")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise ValueError(f"expected rate in (0, 1], got {self.rate}")
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("expected epsilon or noise_multiplier, got neither")
        if self.epsilon is not None and self.images is None and self.mode != "client-level":
            raise ValueError(
                "expected images, a public number, to calibrate noise for an epsilon; or a noise_multiplier"
            )

    # ---- noise and batches -------------------------------------------------------------------------------------------
    @property
    def sigma(self) -> float:
        """Standard deviation of the noise, in units of `clip`; seconds to calibrate where an epsilon is given."""
        if self.epsilon is None:
            return self.noise_multiplier or 0.0
        if self.mode == "client-level":
            return calibrate_noise(self.epsilon, self.delta, 1.0, self.rounds, self.accountant)
        steps = (self.local_steps or 0) * self.rounds
        return calibrate_noise(self.epsilon, self.delta, self.rate or 1.0, steps, self.accountant)

    def _noise_exposure(self, n: int) -> tuple[float, int]:
        """Return at what rate, and how often in a round, a record of a client of `n` images meets noise, as accounted.

        Where batches go round the images, `n` is no secret (zeroing a record out leaves it as it is), so that passes
        are those of the client itself: `steps` go round few images more often than round many.
        """
        whole = (self.images or n) if self._is_poisson_accounted else n
        size = min(self.batch_size or whole, whole)
        per_epoch = -(-whole // size)
        heads = getattr(self, "head_epochs", 0) if self.mode == "dp-joint" else 0
        if self._is_poisson_accounted:
            main = self.steps if self.steps is not None else per_epoch * (self.epochs or 0)
            rate = 1.0 if n <= (self.batch_size or n) else self._sampling_rate or size / n
            return rate, main + heads * per_epoch
        passes = -(-self.steps // per_epoch) if self.steps is not None else self.epochs or 0
        return 1.0, passes + heads

    @property
    def _is_calibrated(self) -> bool:
        """Whether the noise follows from how often a record meets it."""
        return self.epsilon is not None and self.mode != "client-level"

    @property
    def _is_poisson_accounted(self) -> bool:
        """Whether batches count as drawn record by record."""
        return self.sampler == "poisson" or self.mode == "as-published"

    @property
    def _sampling_rate(self) -> float | None:
        """The public rate at which images are drawn; None is batch_size over each client's own number."""
        return self.rate if self.images is None else min(self.batch_size or self.images, self.images) / self.images

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return the phases of the method behind, with batches drawn as `sampler` says."""
        return tuple(self.with_sampling(phase) for phase in super().phases(task, round))

    def with_sampling(self, phase: Phase) -> Phase:
        """Return the phase with batches drawn as `sampler` says."""
        if self.sampler != "poisson":
            return replace(phase, sampler=self.sampler)
        settings = {field.name: getattr(phase, field.name) for field in fields(Phase)}
        settings["sampler"] = "poisson"
        return PoissonPhase(
            **settings, rate=self._sampling_rate, images=self.images, secret=self.noise_source == "secure"
        )

    def aggregation_weight(self, images: int) -> float:
        """Return the public number, where a record more or less must not show; else the client's own."""
        return float(self.images or images) if self.sampler == "poisson" else float(images)

    def _hides_image_count(self, n: int) -> bool:
        """Return whether nothing follows from a client's `n` images being one more or less.

        All that it does must be based on the public number. Few images give themselves away, and so does a number that
        is few when one is gone: those that fit into a batch are in every step.
        """
        return self.sampler == "poisson" and self.images is not None and n > (self.batch_size or n) + 1

    def client_model(self, task: Task) -> nn.Module:
        """Return the network.

        Raises:
            ValueError: its running statistics would be sent without noise.
        """
        model = super().client_model(task)
        norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)}
        model.train(self.train_mode)  # which leaves those alone that their user froze
        if kept := [name for name, module in norms.items() if module.training]:
            raise ValueError(
                f"{self.name}: expected a model without batch statistics, got {', '.join(kept)}: use group norm, or "
                f"train_mode=False"
            )
        return model

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Return the key of the step's noise; none without a generator."""
        drawn = super().draw(batch, task, generator)
        if generator is None or self.mode == "client-level":
            return drawn
        return {**drawn, NOISE_KEY: fresh_key() if self.noise_source == "secure" else draw_key(generator)}

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return gradients clipped sample by sample and with noise, but for what the mode leaves plain."""
        raw = client_loss_gradient(getattr(grad, "raw", grad))  # what a defense is put around
        if self.mode == "client-level":
            return super().gradient(grad, params, batches, step)
        noisy = tuple(n for n in raw.live if self.mode == "dp-joint" or self.scope(n, step.task) is Scope.SHARED)
        plain = tuple(n for n in raw.live if n not in noisy)
        found: Tensors = {}
        for live in (noisy, plain):
            if live:
                made = replace(raw, live=live) if live is plain else self._private_gradient(raw, live)
                part = made if raw is grad else replace(grad, raw=made)  # type: ignore[type-var]
                found.update(super().gradient(part, params, batches, step))
        return {name: found[name] for name in raw.live}

    def _private_gradient(self, raw: LossGradient, live: tuple[str, ...]) -> PrivateGradient:
        """Return the gradient of the parameters `live`, clipped sample by sample and with noise."""
        how = Privatization(
            clip=self.clip, noise_multiplier=self.sigma, denominator=self.denominator(), clip_target=self.clip_target
        )
        settings = {field.name: getattr(raw, field.name) for field in fields(LossGradient)}
        noise = self.step_noise(raw.step.draws)
        return PrivateGradient(**{**settings, "live": live}, privatization=how, noise=noise)

    def fine_tuning_method(self) -> PrivateMethod:
        """Return the method behind, as its clients train at client level.

        Neither clipped nor with noise, shuffled batches.
        """
        return replace(self, mode="client-level", rate=None, local_steps=None)

    def follows_loss_gradient(self, steps: int | None) -> bool:
        """Return whether the server sees updates as they are (client level) and the method behind agrees."""
        return self.mode == "client-level" and getattr(super().gradient, "__func__", None) is Method.gradient

    @property
    def deviation_reason(self) -> str:  # type: ignore[override]
        """What makes equations of its update useless, and the search that knows of it."""
        search = "joint" if self.trains_private_tensors else "ig"
        return f"each image's gradient is clipped and noise is added, which no equation survives; search with {search}"

    def step_noise(self, draws: dict[str, Tensor]) -> Noise | None:
        """Return the noise of a step, or None for who does not know its key."""
        return Noise(draws[NOISE_KEY], self.noise_source == "secure") if NOISE_KEY in draws else None

    def denominator(self) -> float | None:
        """Return what a sum of gradients is divided by; None is the size of the batch."""
        return None if self.mode == "as-published" else self.batch_size or self.images

    # ---- server ------------------------------------------------------------------------------------------------------
    @property
    def aggregates_mean_only(self) -> bool:
        """Whether the mean is all the server needs: not at client level, where it shortens every update."""
        return self.mode != "client-level"

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return the state with a count of the rounds that each client took part in."""
        server = super().init_server(params, task, clients, generator)
        own = {**server.own, PARTICIPATION: {"rounds": torch.zeros(clients, dtype=torch.int64)}}
        if self.mode == "client-level":
            own[SERVER_NOISE] = {"key": draw_key(generator)}
        return replace(server, own=own)  # type: ignore[arg-type]

    @property
    def max_participations(self) -> int:
        """The number of rounds that a client's budget is spent on."""
        return self.rounds

    def exclusion_reason(self, server: ServerState, client: int) -> str:
        """Return why the client takes no more part, its budget being spent on `rounds` rounds; else an empty string."""
        count = dense(server.own[PARTICIPATION]["rounds"])
        if client >= len(count) or int(count[client]) < self.rounds:
            return ""
        return f"client {client} has spent its privacy budget on {self.rounds} rounds and neither trains nor sends more"

    def begin_round(self, server: ServerState, clients: Sequence[int], task: Task) -> ServerState:
        """Return the state of the method behind, with the round charged to its clients before anything leaves them."""
        server = super().begin_round(server, clients, task)
        count = dense(server.own[PARTICIPATION]["rounds"]).clone()
        count[list(clients)] += 1
        return replace(server, own={**server.own, PARTICIPATION: {"rounds": count}})

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Aggregate as the method behind; with clipping and noise at client level."""
        if self.mode != "client-level" or not uploads:
            return super().aggregate(server, uploads, task)
        after = super().aggregate(server, [self._clip_upload(upload) for upload in uploads], task)
        shared = {name: dense(value) for name, value in after.shared.items()}
        key = dense(server.own[SERVER_NOISE]["key"]) + torch.tensor([0, server.round])
        noise = Noise(fresh_key(), True) if self.noise_source == "secure" else Noise(key)
        std = self.sigma * self.clip / len(uploads)
        return replace(after, shared={n: shared[n] + std * z for n, z in noise.like(shared).items()})

    def _clip_upload(self, upload: Upload) -> Upload:
        """Return the update at most `clip` long, and all clients alike; nothing where it is not finite."""
        size = float(norm(upload.update))
        if not math.isfinite(size):
            return replace(upload, update=zeros(upload.update, upload.update), weight=1.0)
        return replace(
            upload, update=scale_tensors(upload.update, min(1.0, self.clip / (size + NORM_STABILIZER))), weight=1.0
        )

    # ---- what may be said --------------------------------------------------------------------------------------------
    def privacy(self, sizes: Sequence[int], rounds: int, *, record_reader: str = "") -> PrivacyStatement:
        """Return what differential privacy the client with least of it has after `rounds` rounds.

        Args:
            sizes: the clients' numbers of images.
            rounds: how many a client took part in, at most; all are charged.
            record_reader: name of a defense that looks at single records, which breaks the guarantee.

        Raises:
            ValueError: no client.
        """
        if not sizes:
            raise ValueError("expected at least 1 client, got none")
        sigma, clients = self.sigma, self.mode == "client-level"
        pairs = {(1.0, 1)} if clients else {self._noise_exposure(n) for n in sizes}
        charges = [Charge(sigma, rate, steps * rounds) for rate, steps in sorted(pairs)]
        reason = self._no_epsilon_reason(sigma, record_reader)
        most, epsilon, by_rdp = (charges[-1], None, None) if reason else costliest_charge(charges, self.delta)
        return PrivacyStatement(
            unit="client" if clients else "record",
            adjacency="add-remove" if all(map(self._hides_image_count, sizes)) else "zero-out",
            mode=self.mode,
            released="the mean of the clients' updates" if clients else self.released,
            trusted="the server, which sees every update without noise" if clients else "nobody else",
            sampler=self.sampler,
            rate=most.rate,
            noise_multiplier=sigma,
            clip=self.clip,
            steps=most.steps,
            delta=self.delta,
            epsilon=epsilon,
            epsilon_rdp=by_rdp,
            reason=reason,
            profile="release" if self.noise_source == "secure" else "experiment",
        )

    def _no_epsilon_reason(self, sigma: float, record_reader: str) -> str:
        """Return why no epsilon follows, or nothing."""
        if sigma == 0:
            return "no noise is added"
        if record_reader and self.mode != "client-level":
            return f"the defense {record_reader} looks at the records beside the noisy gradients"
        if self.mode != "as-published":
            return ""
        shuffled = "batches of one size are accounted as if every record were drawn by itself"
        if not self.trains_private_tensors:
            return shuffled
        return (
            "private weights are trained without noise on the same records and enter every other record's gradient, so "
            f"one record moves a sum by up to twice the batch size times the clip, not the clip; and {shuffled}"
        )
