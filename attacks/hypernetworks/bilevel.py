"""The tailored attack of the HyperFL paper finds the embedding by matching gradients, then inverts the image."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from attacks.base import Attack, NotApplicable, Preset, Reconstruction, Result, attacks
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch, stack_variables
from attacks.gradient_matching.engine.best_iterates import BestIterates, TrialResult
from attacks.gradient_matching.engine.memory_estimate import GIB, saved_bytes, split_into_portions, trials_in_cache
from attacks.gradient_matching.engine.minimization import describe_cut, pixel_bounds
from attacks.gradient_matching.engine.objectives import l2, normalize
from attacks.gradient_matching.engine.optimizers import Adam
from attacks.gradient_matching.engine.problem import INPUTS, Variables, batching_key, private_key, tensor_form
from attacks.gradient_matching.engine.regularizers import total_variation
from attacks.hypernetworks.hypernet_view import HypernetView, parse_hypernet_view
from attacks.hypernetworks.peel import SolvedHypernet
from attacks.search_control import SearchControl, SearchMonitor
from fl.client import Client
from fl.defense import ask_surrogate
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, TRUNK_WEIGHT, Hypernetwork
from fl.network import Network
from fl.ranges import Count, Limit, StepSize, Weight
from fl.seeds import stream
from fl.tensors import Tensors, dense, leaf_tensors, low_rank_approximation
from fl.view import ServerView

MAX_RANK = 8
"""Outer products kept of a dense upload of many steps."""


@dataclass(frozen=True)
class EmbeddingProblem:
    """The lower level: what a guess of embedding and output would have sent, compared with what was sent.

    The gradient of the inner loss is outer products, and so is the observed one (a dense upload is cut down to as many
    as there were steps): none is ever multiplied out.

    Attributes:
        view: what the server saw.
        observed: the hypernetwork's gradient, without decay and step size.
        inner: the inner loss: "squared" or "logcosh".
    """

    view: ServerView
    observed: Tensors
    inner: str

    @classmethod
    def of(cls, hypernet: HypernetView, inner: str) -> EmbeddingProblem:
        """Return the problem of a view whose decay is known."""
        rank = min(hypernet.steps or MAX_RANK, MAX_RANK)
        observed: Tensors = {}
        for name in hypernet.update.shared:  # not a shared classifier or further payloads: no inner loss reaches them
            value = hypernet.change[name]
            if name.startswith("hypernet.heads.") and isinstance(value, Tensor) and value.ndim == 2:
                value = low_rank_approximation(value, min(rank, *value.shape))
            observed[name] = value
        lr = hypernet.group.lr
        return cls(hypernet.view, {name: value * (1 / lr) for name, value in observed.items()}, inner)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """All tensors of the problem, as one tree."""
        observed, size = normalize(self.observed)
        return {"shared": self.view.shared, "update": self.view.update, "observed": observed, "size": size}

    def initial_variables(self, draw: torch.Generator, *, normal: bool) -> Variables:
        """Return an embedding and an output to begin with: that of the embedding, or N(0, 1)."""
        like = dense(self.view.shared[TRUNK_WEIGHT])
        v = torch.randn(like.shape[1], generator=draw).to(like)
        theta = self.generate(v)
        if normal:
            theta = {n: torch.randn(w.shape, generator=draw).to(w) for n, w in theta.items()}
        return {private_key(EMBEDDING): v} | {private_key(n): w for n, w in theta.items()}

    def generate(self, embedding: Tensor) -> dict[str, Tensor]:
        """Return h(v), by the network's names."""
        return self._hypernetwork.generate(_hypernet_parameters(self.view, embedding), self.view.client.task)

    def objective(self, embedding: Tensor, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the squared distance of the inner loss's gradient and the observed one, relative to the latter."""
        guess = {private_key(EMBEDDING): embedding} | {private_key(n): w for n, w in outputs.items()}
        return self.value(guess, self.constants, self.view.client, vmapped=False)

    def value(self, variables: Variables, constants: dict[str, Any], client: Client, *, vmapped: bool) -> Tensor:
        """Return the objective at `variables`, with the tensors of `constants`.

        Args:
            variables: embedding and output, by name.
            constants: tensors of the problem, perhaps of another in the batch.
            client: of the view.
            vmapped: whether this runs under `torch.vmap`; nothing depends on it.
        """
        view = replace(self.view, shared=constants["shared"], update=constants["update"])
        params, generator = _hypernet_parameters(view, variables[private_key(EMBEDDING)]), self._hypernetwork
        made = generator.generate(params, client.task)
        residuals = {n: w - variables[private_key(n)] for n, w in made.items()}
        if self.inner == "logcosh":
            residuals = {n: r.tanh() for n, r in residuals.items()}
        predicted = generator.pull_back(params, residuals, client.task, list(constants["observed"]))
        if view.threat.knows_defense:
            predicted = ask_surrogate(view.defense, predicted, view.update)
        return l2(predicted, constants["observed"], constants["size"])

    @property
    def _hypernetwork(self) -> Hypernetwork:
        generator = self.view.method.parametrization
        assert isinstance(generator, Hypernetwork)
        return generator


def _hypernet_parameters(view: ServerView, embedding: Tensor) -> Tensors:
    return view.method.parametrization.lift({**view.shared, EMBEDDING: embedding})


@dataclass(frozen=True)
class ImageProblem:
    """The upper level: images whose labels a classifier of any start finds behind the extractor that was recovered.

    Attributes:
        view: what the server saw.
        extractor: recovered, by the network's names.
        labels: (N,) known ones, or drawn.
        tv_weight: of the total variation, in normalized units.
        optimized: whose gradient is wanted: "images" or "classifier"; the others' is zero.
    """

    view: ServerView
    extractor: dict[str, Tensor]
    labels: Tensor
    tv_weight: float
    optimized: str = "images"

    @cached_property
    def constants(self) -> dict[str, Any]:
        """All tensors of the problem, as one tree."""
        view, task = self.view, self.view.client.task
        offset, scale = (
            torch.tensor(x, dtype=view.dtype, device=view.device).view(-1, 1, 1) for x in (task.mean, task.std)
        )
        return {
            "extractor": self.extractor,
            "labels": self.labels,
            "buffers": {**task.buffers, **view.buffers},
            "offset": offset,
            "scale": scale,
        }

    def initial_variables(self, draw: torch.Generator) -> Variables:
        """Return images from N(0, 1) in normalized units, and a classifier.

        That is as it was sent, else its biases are 0 and its weights N(0, 1 / fan-in).
        """
        task = self.view.client.task
        made = {INPUTS: torch.randn(len(self.labels), *task.input_shape, generator=draw)}
        for name, like in task.parameters.items():
            if name.startswith(task.head):
                drawn = torch.randn(like.shape, generator=draw) if like.ndim > 1 else torch.zeros(like.shape)
                sent = self.view.shared.get(name)
                made[private_key(name)] = drawn / like.shape[1:].numel() ** 0.5 if sent is None else dense(sent)
        return {name: value.to(dtype=self.view.dtype, device=self.view.device) for name, value in made.items()}

    def value(self, variables: Variables, constants: dict[str, Any], client: Client, *, vmapped: bool) -> Tensor:
        """Return the cross-entropy plus the total variation.

        Args:
            variables: images, and the classifier's parameters.
            constants: tensors of the problem, perhaps of another in the batch.
            client: of the view.
            vmapped: whether this runs under `torch.vmap`; nothing depends on it.
        """
        classifier = {n: variables[private_key(n)] for n in client.task.parameters if private_key(n) in variables}
        inputs = variables[INPUTS]
        if self.optimized == "images":
            classifier = {name: value.detach() for name, value in classifier.items()}
        else:
            inputs = inputs.detach()
        pixels = inputs * constants["scale"] + constants["offset"]
        network = Network(client.fixed_statistics_model, {**constants["extractor"], **classifier}, constants["buffers"])
        loss = nn.functional.cross_entropy(network(pixels), constants["labels"])
        return loss + self.tv_weight * total_variation(pixels, constants["scale"].flatten())


LevelProblem = TypeVar("LevelProblem", EmbeddingProblem, ImageProblem)


@attacks.register("bilevel")
@dataclass(frozen=True, kw_only=True)
class Bilevel(Attack):
    """The attack HyperFL's authors made for HyperFL (Guo et al., AAAI 2025, Eq. 9-10 and appendix D.1).

    The paper gives neither code nor constants. As read here:

    - lower level (Eq. 10): a dummy embedding v and a dummy output theta; the gradient of an inner loss between h(v)
      and theta with respect to the hypernetwork is matched to the observed one (L2, Adam), as DLG does with an image
      and a label;
    - upper level: v stays fixed and generates the extractor; the image is sought by model inversion, through a
      classifier that starts anywhere (where it is shared, as the server sent it) and is trained in turn with the image
      (UnSplit, Erdogan et al. 2022), with total variation. The update itself no longer enters.

    The paper holds the lower level to be hard, because theta has too many entries to be searched for. With the inner
    loss 1/2 |h(v) - theta|^2 it has a solution in closed form: the loss's gradient with respect to h(v) is the
    residual h(v) - theta itself, the head biases' update is that gradient, and the rest follows from products
    (`peel`). It stands here as published, to be compared with: on small networks the search comes within a tenth of
    the embedding, on the published one 3000 iterations were not enough (one image: still further off than its norm).
    The paper's iterations and total variation go by the name `published`; the defaults of `tv_weight` and `head_lr`
    found more in short searches (benchmarks/results/settings.md).

    Threat model: an honest-but-curious server that sees one client's update and knows its local training;
    embedding, classifier and labels are the client's own. The hypernetwork is shared and trained by SGD.

    Attributes:
        inner: the inner loss: "squared", or "logcosh" (the sum of log cosh of the residuals).
        lower_iterations: of the search for the embedding. `iterations` does not shorten it: the picture is sought
            through the extractor that this search ends at, so cutting both at once would hide which of them fell
            short. Each runs the whole hypernetwork; for a quick try set both.
        lower_lr: its step size, for v and theta (Adam, divided by ten at 3/8, 5/8 and 7/8).
        lower_init: where theta starts: "output" at h(v) of the dummy v, "normal" at N(0, 1) as DLG's labels do,
            from where the search ended far from the embedding in every trial on a small network.
        iterations: of the search for the image.
        lr: step size of the image, in normalized units (signed Adam, divided by ten at 3/8, 5/8 and 7/8).
        head_lr: step size of the classifier (Adam).
        tv_weight: weight of the total variation, in normalized units.
        restarts: of both levels; the smallest objective wins, of each the smallest of its last eighth.
        max_parallel_trials: trials (views and restarts) evaluated at once, at most; fewer where that is faster.
        memory_limit_gib: GiB that a batch's evaluation may keep, by an estimate: fewer trials share a batch then;
            infinity is no limit.
        compile: make machine code of searches of 2,000 iterations and more by torch.compile.
    """

    plain: ClassVar[str] = "guesses the secret code first and the picture after, as the paper of hyperfl did."

    presets: ClassVar[dict[str, Preset]] = {
        "published": Preset(
            "HyperFL (Guo et al., AAAI 2025), appendix D.1; it says nothing of the classifier's step size",
            {"iterations": 10_000, "tv_weight": 1e-6, "head_lr": 1e-3},
        ),
    }

    former_names: ClassVar[Mapping[str, str]] = {
        "lower_start": "lower_init",
        "tv": "tv_weight",
        "stack": "max_parallel_trials",
        "memory": "memory_limit_gib",
        "compiled": "compile",
    }

    inner: Literal["squared", "logcosh"] = "squared"
    lower_iterations: Count = 3000
    lower_lr: StepSize = 0.01
    lower_init: Literal["output", "normal"] = "output"
    iterations: Count = 10_000
    lr: StepSize = 0.1
    head_lr: StepSize = 1e-2
    tv_weight: Weight = 1e-2
    restarts: Count = 1
    max_parallel_trials: Count = 32
    memory_limit_gib: Limit = 8.0
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("lower_iterations", "iterations", "restarts", "max_parallel_trials"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if not self.memory_limit_gib > 0:
            raise ValueError(f"expected memory_limit_gib > 0 (infinity is no limit), got {self.memory_limit_gib}")
        for name in ("lower_lr", "lr", "head_lr", "tv_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} >= 0 and finite, got {getattr(self, name)}")

    @classmethod
    def example(cls) -> Bilevel:
        """Return a few iterations of each level."""
        return cls(lower_iterations=5, iterations=5)

    def view_batches(self, views: Sequence[ServerView]) -> list[Sequence[int]]:
        """Return the views' indices in portions that each fill one stack of trials."""
        return split_into_portions(views, self.max_parallel_trials, self.restarts)

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        """Return embedding, extractor and images; the objective is that of the lower level, relative to its start."""
        return self.run_controlled(views, seeds, SearchControl())

    def run_controlled(self, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl) -> list[Result]:
        """Attack several views within what `control` allows; the two levels share the time equally."""
        found = [self._parse(view) for view in views]
        hypernet = {i: o for i, o in enumerate(found) if isinstance(o, HypernetView)}
        lower = [trial for i, o in hypernet.items() for trial in self._embedding_trials(i, o, seeds[i])]
        embeddings = self._run_trials(lower, self._search_embeddings, SearchMonitor(control, levels_left=2))
        peeled = {i: _peel_with(hypernet[i], row) for i, (row, *_) in embeddings.items()}
        upper = [trial for i, one in peeled.items() for trial in self._image_trials(i, one, seeds[i])]
        images = self._run_trials(upper, self._search_images, SearchMonitor(control))
        unsearched = NotApplicable("no trial was run")
        if stopped := control.stop_reason():
            reason = f"no trial was run before {stopped}"
            unsearched = NotApplicable(reason, limit=True, cut_short=reason)
        results: list[Result] = [unsearched if isinstance(o, HypernetView) else o for o in found]
        for i, one in peeled.items():
            if i not in images:
                continue
            view, (_, objective, history, _, lower_cut) = one.view, embeddings[i]
            task = view.client.task
            std, mean = (images[i][0][INPUTS].new_tensor(x).view(-1, 1, 1) for x in (task.std, task.mean))
            results[i] = Reconstruction(
                inputs=(images[i][0][INPUTS] * std + mean).clamp(0, 1),
                labels=view.labels,
                objective=objective,
                history=(*history, objective),
                private=one.private(),
                knowledge=("labels",) if view.labels is not None else (),
                note="; ".join(filter(None, (lower_cut, images[i].cut_short))),
                cut_short=lower_cut or images[i].cut_short,
            )
        return results

    def _parse(self, view: ServerView) -> HypernetView | NotApplicable:
        """Return the hypernetwork's update without decay, or why this attack says nothing about the view."""
        single = self.single_client_view(view)
        if isinstance(single, NotApplicable):
            return single
        if single.batch_size is None:
            return NotApplicable("the number of images is unknown")
        hypernet = parse_hypernet_view(single)
        if isinstance(hypernet, HypernetView) and not any(value.any() for value in leaf_tensors(hypernet.change)):
            return NotApplicable("the update is zero, or nothing but weight decay: no gradient reached it")
        return hypernet

    # ---- the trials --------------------------------------------------------------------------------------------------
    def _embedding_trials(self, index: int, hypernet: HypernetView, seed: int) -> Iterator[_Trial[EmbeddingProblem]]:
        """Return the searches for one view's embedding."""
        level = EmbeddingProblem.of(hypernet, self.inner)
        for restart in range(self.restarts):
            draw = stream(seed, "bilevel", "lower", restart)
            yield _Trial(index, level, level.initial_variables(draw, normal=self.lower_init == "normal"))

    def _image_trials(self, index: int, peeled: SolvedHypernet, seed: int) -> Iterator[_Trial[ImageProblem]]:
        """Return the searches for one view's images."""
        view = peeled.view
        count, classes = view.batch_size or 1, view.client.task.num_classes
        for restart in range(self.restarts):
            draw = stream(seed, "bilevel", "upper", restart)
            labels = view.labels
            if labels is None:  # nothing tells them: a class is inverted, whichever it is
                labels = torch.randint(classes, (count,), generator=draw).to(view.device)
            level = ImageProblem(view, peeled.extractor, labels, self.tv_weight)
            yield _Trial(index, level, level.initial_variables(draw))

    def _run_trials(
        self,
        trials: Sequence[_Trial[LevelProblem]],
        search: Callable[[list[LevelProblem], Variables, SearchMonitor], list[TrialResult]],
        monitor: SearchMonitor,
    ) -> dict[int, TrialResult]:
        """Return what the best trial of every view found; those of equal form share stacks."""
        groups: dict[object, list[_Trial[LevelProblem]]] = {}
        for trial in trials:
            key: object = (batching_key(trial.problem.view), tensor_form(trial.problem.constants))
            groups.setdefault(key, []).append(trial)
        best: dict[int, TrialResult] = {}
        sizes = {key: self._batch_size(members[0]) for key, members in groups.items()}
        monitor.batches = sum(-(-len(members) // sizes[key]) for key, members in groups.items())
        for key, members in groups.items():
            size = sizes[key]
            for begin in range(0, len(members), size):
                chunk = members[begin : begin + size]
                if monitor.begin_batch():
                    break
                start = stack_variables(trial.start for trial in chunk)
                found = search([trial.problem for trial in chunk], start, monitor)
                for trial, one in zip(chunk, found, strict=True):
                    if trial.index not in best or _final_objective(one) < _final_objective(best[trial.index]):
                        best[trial.index] = one
        return best

    def _batch_size(self, trial: _Trial[LevelProblem]) -> int:
        """Return how many trials share a batch."""
        each = saved_bytes(trial.problem, trial.start) / GIB
        return max(
            1,
            int(
                min(
                    self.max_parallel_trials,
                    trials_in_cache(trial.problem.view),
                    self.memory_limit_gib / max(each, 1 / GIB),
                )
            ),
        )

    # ---- the searches ------------------------------------------------------------------------------------------------
    def _search_embeddings(
        self, levels: list[EmbeddingProblem], start: Variables, monitor: SearchMonitor
    ) -> list[TrialResult]:
        """Search for embedding and output together, by Adam; return the result of each trial."""
        settings = GradientMatching(iterations=self.lower_iterations, private_lr=self.lower_lr, clamp_pixels=False)
        return settings.search(ProblemBatch(levels, compiled=self.compile), start, [], monitor)

    def _search_images(
        self, levels: list[ImageProblem], variables: Variables, monitor: SearchMonitor
    ) -> list[TrialResult]:
        """Move images (by sign) and classifier in turn, and return the best iterate of each trial."""
        pictures = ProblemBatch(levels, compiled=self.compile)
        heads = ProblemBatch([replace(level, optimized="classifier") for level in levels], compiled=self.compile)
        settings = GradientMatching(iterations=self.iterations, lr=self.lr, private_lr=self.head_lr)
        image, classifier = Adam(settings, []), Adam(replace(settings, schedule="none"), [])
        limits = pixel_bounds(levels[0])
        best = BestIterates(variables, image.final_phase_start)
        for iteration in range(self.iterations + 1):
            for stack in (pictures, heads):
                stack.expect_iterations(self.iterations - iteration, variables)
            values, grads = pictures.evaluate(variables)
            best.update(iteration, values, variables)
            if iteration == self.iterations:
                break
            if reason := monitor.after(iteration):
                best.mark_cut_short(describe_cut(iteration, self.iterations, reason))
                break
            moved = image.step(variables, {INPUTS: grads[INPUTS]})
            variables = variables | {INPUTS: moved[INPUTS].clamp(*limits)}
            if len(variables) > 1:  # else the classifier is the server's own and stands still
                _, grads = heads.evaluate(variables)
                variables |= classifier.step(variables, {name: g for name, g in grads.items() if name != INPUTS})
        return best.results()


@dataclass(frozen=True)
class _Trial(Generic[LevelProblem]):
    """A search of one level for the view of that index, and where it starts."""

    index: int
    problem: LevelProblem
    start: Variables


def _final_objective(found: TrialResult) -> float:
    """Return the objective of the best iterate, not relative to the start."""
    return found.objective * found.start_objective


def _peel_with(hypernet: HypernetView, row: Variables) -> SolvedHypernet:
    """Return what follows from the embedding that was found."""
    v = row[private_key(EMBEDDING)].double()
    return SolvedHypernet(hypernet, hypernet.update.hidden(v), v, "search", float("nan"))
