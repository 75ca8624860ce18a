"""Updates as frameworks write them: made by plain torch, given to the command as a file or to `hyperleak.audit`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.reliability.situations import networks
from benchmarks.reliability.situations.row import OWN_MODEL, Command, Given, Python, Right, Situation
from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from fl.data.sources.npz_files import save_images

PART = "Updates as frameworks write them"
SHAPE = (3, 32, 32)
RATE = 0.1
PLAIN = "{name: fedavg, lr: 0.1, steps: 1}"
SEARCH = "{name: ig, iterations: 300}"
HOW = ("--method", PLAIN)
EXACT, CLOSER = Right(kind="exact"), Right(kind="closer")
State = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
sgd = partial(torch.optim.SGD, lr=RATE)


def trained(
    model: nn.Module,
    count: int = 1,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    steps: int = 1,
    first: int = 0,
    loss: Loss = nn.functional.cross_entropy,
) -> State:
    """Return the state after steps on all of `count` photographs."""
    after = copy.deepcopy(model)
    images, labels = (part[first : first + count] for part in networks.photos())
    rule = optimizer([value for value in after.parameters() if value.requires_grad])
    for _ in range(steps):
        rule.zero_grad()
        loss(after(images), labels).backward()
        rule.step()
    return {name: value.detach().clone() for name, value in after.state_dict().items()}


def difference(model: nn.Module, after: Mapping[str, Tensor]) -> State:
    """Return weights before - after, buffers included."""
    return {name: value.detach() - after[name] for name, value in model.state_dict().items()}


def arrays(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return tensors as NumPy has them."""
    return {name: value.numpy() for name, value in state.items()}


def command(
    folder: Path,
    *words: str,
    model: str = "dense",
    count: int = 1,
    first: int = 0,
    attacks: Sequence[str] = ("analytic",),
) -> Command:
    """Return `hyperleak audit update ...` of a model of `networks`, with the true photographs beside it."""
    images, labels = (part[first : first + count] for part in networks.photos())
    pixels = (255 * images).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    save_images(folder / "true.npz", pixels, labels.numpy(), [str(number) for number in range(networks.CLASSES)])
    tried = [word for name in attacks for word in ("--attack", name)]
    given = ["audit", "update", *words, "--model", OWN_MODEL, "--images", "true.npz", *tried]
    return Command(model=f"{networks.__name__}:{model}", words=given, folder=folder)


def files() -> Iterator[Situation]:
    """Yield what files of updates look like."""
    yield from _names_of_tensors()
    yield from _containers()
    yield from _lost()
    yield from _numbers()
    yield from _parts_of_models()
    yield from _running_statistics()


def _of_file(words: str, write: Callable[[Path], Given], right: Right = EXACT) -> Situation:
    return Situation(words=words, part=PART, give=write, right=right)


def change_of_one_step() -> State:
    """Return the update of the perceptron after one step on one picture."""
    model = networks.dense()
    return difference(model, trained(model))


def _names_of_tensors() -> Iterator[Situation]:
    """Yield what tensors are called, and arrays without names."""

    def named(words: str, prefix: str, note: str) -> Situation:
        def write(folder: Path) -> Given:
            np.savez(
                folder / "update.npz", **arrays({prefix + name: value for name, value in change_of_one_step().items()})
            )
            return command(folder, "update.npz", *HOW)

        return _of_file(words, write, Right(kind="exact", words=(note,)))

    def flower(folder: Path) -> Given:
        np.savez(folder / "update.npz", *arrays(change_of_one_step()).values())
        return command(folder, "update.npz", *HOW)

    yield _of_file("Flower's list of arrays without names, .npz", flower)

    def pickled(folder: Path) -> Given:
        values = list(arrays(change_of_one_step()).values())
        held = np.empty(len(values), dtype=object)
        held[:] = values
        held.dump(folder / "update.pkl")
        return command(folder, "update.pkl", *HOW)

    words = ("pickle can run code", "numpy.savez")
    yield _of_file("Flower's list as a pickle, .pkl", pickled, Right(kind="refused", words=words))
    yield named("Opacus: `_module.` before all names", "_module.", "_module")
    yield named("Lightning: `model.` before all names", "model.", "model")
    yield named("a wrapper of one's own: `net.` before all names", "net.", "net")
    yield named("DataParallel: `module.` before all names", "module.", "module")
    yield named("torch.compile: `_orig_mod.` before all names", "_orig_mod.", "_orig_mod")


def _containers() -> Iterator[Situation]:
    """Yield weights before, after or both, in the files that frameworks write."""

    def checkpoint(folder: Path) -> Given:
        wrapped = {f"model.{name}": value for name, value in change_of_one_step().items()}
        held = {"epoch": 1, "state_dict": {**wrapped, "loss.weight": torch.ones(3)}, "hyper_parameters": {"lr": RATE}}
        torch.save(held, folder / "update.ckpt")
        return command(folder, "update.ckpt", *HOW)

    yield _of_file("Lightning's checkpoint, .ckpt", checkpoint)

    def one_file(folder: Path) -> Given:
        model = networks.dense()
        torch.save({"before": dict(model.state_dict()), "after": trained(model)}, folder / "round.pt")
        return command(folder, "round.pt", *HOW)

    yield _of_file("weights before and after in one file", one_file)

    def two_files(folder: Path) -> Given:
        model = networks.dense()
        torch.save(dict(model.state_dict()), folder / "sent.pt")
        safetensors.torch.save_file(trained(model), folder / "returned.safetensors")
        return command(folder, "--before", "sent.pt", "--after", "returned.safetensors", *HOW)

    yield _of_file("weights before and after in two files", two_files)

    def returned(folder: Path) -> Given:
        np.savez(folder / "returned.npz", **arrays(trained(networks.dense())))
        return command(folder, "--after", "returned.npz", *HOW)

    yield _of_file("the weights that came back alone", returned)

    yield _of_file("Hugging Face's .safetensors", _safetensors)


def _safetensors(folder: Path) -> Given:
    """Write an update as Hugging Face does."""
    safetensors.torch.save_file(change_of_one_step(), folder / "update.safetensors")
    return command(folder, "update.safetensors", *HOW)


def _lost() -> Iterator[Situation]:
    """Yield files that are not there, in part or at all."""

    def cut(folder: Path) -> Given:
        given, path = _safetensors(folder), folder / "update.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
        return given

    yield _of_file(
        "a .safetensors file that was cut off",
        cut,
        Right(kind="refused", words=("can't be read as .safetensors", "If it was cut off, get it again")),
    )

    def nothing(folder: Path) -> Given:
        return command(folder, "missing.npz", *HOW)

    yield _of_file("a file that is not there", nothing, Right(kind="refused", words=("no file",)))


def _numbers() -> Iterator[Situation]:
    """Yield an update in fewer digits, and gradients."""

    def half(kind: torch.dtype, folder: Path) -> Given:
        torch.save({name: value.to(kind) for name, value in change_of_one_step().items()}, folder / "update.pt")
        return command(folder, "update.pt", *HOW)

    yield _of_file("rounded to float16", partial(half, torch.float16), CLOSER)
    yield _of_file("rounded to bfloat16", partial(half, torch.bfloat16), CLOSER)

    def gradient(folder: Path) -> Given:
        np.savez(
            folder / "gradient.npz", **arrays({name: value / RATE for name, value in change_of_one_step().items()})
        )
        return command(folder, "gradient.npz", "--kind", "gradient", *HOW)

    yield _of_file("gradients in place of an update", gradient)


def _parts_of_models() -> Iterator[Situation]:
    """Yield updates that hold a part of the tensors, or one of them twice."""

    def lora(folder: Path) -> Given:
        model = networks.adapted()
        change = difference(model, trained(model))
        sent = {name.replace(".default", ""): value for name, value in change.items() if "lora_" in name}
        safetensors.torch.save_file(sent, folder / "adapter_model.safetensors")
        tried = ("analytic", SEARCH)
        return command(folder, "adapter_model.safetensors", *HOW, model="adapted", attacks=tried)

    yield _of_file("PEFT: LoRA adapters alone, the base frozen", lora, CLOSER)

    def some(folder: Path) -> Given:
        sent = {name: value for name, value in change_of_one_step().items() if name.startswith("1.")}
        np.savez(folder / "update.npz", **arrays(sent))
        return command(folder, "update.npz", *HOW)

    yield _of_file("only some layers sent: the first", some)

    def last(folder: Path) -> Given:
        model = networks.lenet()
        sent = {name: value for name, value in difference(model, trained(model)).items() if name.startswith("7.")}
        np.savez(folder / "update.npz", **arrays(sent))
        return command(folder, "update.npz", *HOW, model="lenet", attacks=("cascade", SEARCH))

    yield _of_file("only some layers sent: the classifier", last, CLOSER)

    def tied(folder: Path) -> Given:
        model = networks.tied()
        np.savez(folder / "update.npz", **arrays(difference(model, trained(model))))
        return command(folder, "update.npz", *HOW, model="tied")

    yield _of_file("tied weights, by both of their names", tied)


def _running_statistics() -> Iterator[Situation]:
    """Yield an update that holds the running statistics of batch normalization."""

    def moved(how: Sequence[str], folder: Path) -> Given:
        model = networks.normed().train()
        np.savez(folder / "update.npz", **arrays(difference(model, trained(model, 2))))
        words = ("update.npz", "--batch-size", "2", *how)
        return command(folder, *words, model="normed", count=2, attacks=(SEARCH,))

    told = "batch norm moved in the file, the model in evaluation mode"
    yield _of_file(told, partial(moved, HOW), Right(kind="closer", words=("running statistics, say",)))
    warned = Right(kind="warned", words=("evaluation mode",))
    yield _of_file(f"{told}, training not stated", partial(moved, ()), warned)


def training() -> Iterator[Situation]:
    """Yield how clients train, as far as that is known."""

    def situation(
        words: str,
        optimizer: Callable[..., torch.optim.Optimizer],
        method: str | None,
        right: Right,
        steps: int = 1,
        attacks: Sequence[str] = ("analytic", SEARCH),
        count: int = 1,
    ) -> Situation:
        def write(folder: Path) -> Given:
            model = networks.dense()
            np.savez(folder / "update.npz", **arrays(difference(model, trained(model, count, optimizer, steps))))
            how = () if method is None else ("--method", method)
            size = () if count == 1 else ("--batch-size", str(count))
            return command(folder, "update.npz", *size, *how, attacks=attacks, count=count)

        return Situation(words=words, part=PART, give=write, right=right)

    optim, exact, closer = torch.optim, Right(kind="exact"), Right(kind="closer")
    label = Right(kind="found", figure="label_overlap", why="true label; no picture in these seconds")
    adam = partial(optim.Adam, lr=1e-3)
    sized = ("adaptive-step", "{name: adaptive-step+ig, iterations: 300}")
    for name, rule in (("Adam", adam), ("AdamW", partial(optim.AdamW, lr=1e-3)), ("RMSprop", optim.RMSprop)):
        rate = 0.01 if name == "RMSprop" else 0.001
        shrunk = ", weight_decay: 0.01" if name == "AdamW" else ""  # torch's default
        told = f"{{name: fedavg, optimizer: {name.lower()}, lr: {rate}{shrunk}, steps: 1}}"
        yield situation(f"one step of {name}", rule, told, closer, attacks=sized)
    unsaid = Right(kind="warned", words=("does not look like a step of SGD",))
    yield situation("one step of Adam, which nobody says", adam, None, unsaid)
    momentum = partial(optim.SGD, lr=RATE, momentum=0.9)
    yield situation(
        "one step of SGD with momentum", momentum, "{name: fedavg, lr: 0.1, momentum: 0.9, steps: 1}", exact
    )
    told = "{name: fedavg, lr: 0.1, momentum: 0.9, steps: 5, batch_size: null}"
    yield situation("five steps of SGD with momentum", momentum, told, closer, steps=5)
    decay = partial(optim.SGD, lr=RATE, weight_decay=0.01)
    yield situation("weight decay, stated", decay, "{name: fedavg, lr: 0.1, weight_decay: 0.01, steps: 1}", exact)
    yield situation("weight decay, which nobody says", decay, PLAIN, exact)
    told = "{name: fedavg, lr: 0.1, epochs: 5, batch_size: null}"
    slow = partial(optim.SGD, lr=0.01)
    yield situation("five epochs on two pictures", slow, told.replace("0.1", "0.01"), closer, steps=5, count=2)
    yield situation("five epochs of Adam", adam, told.replace("0.1", "0.001, optimizer: adam"), label, steps=5)
    yield situation("step size not known", sgd, "{name: fedavg, steps: 1}", exact)
    yield situation("number of steps not known", sgd, "{name: fedavg, lr: 0.1}", closer, steps=3)
    yield situation("nothing known of the training", sgd, None, Right(kind="closer"))


def clipped(values: Sequence[Tensor], *, clip: Callable[[Sequence[Tensor]], object]) -> torch.optim.Optimizer:
    """Return SGD along gradients that are cut to a norm, or number by number."""
    rule = torch.optim.SGD(values, lr=RATE)

    def cut(*_: Any) -> None:
        clip(values)

    rule.register_step_pre_hook(cut)
    return rule


def without_vectors(values: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return SGD whose decay spares biases."""
    kinds = ([value for value in values if value.ndim > 1], 0.01), ([value for value in values if value.ndim < 2], 0.0)
    return torch.optim.SGD([{"params": own, "weight_decay": decay} for own, decay in kinds], lr=RATE)


def untold() -> Iterator[Situation]:
    """Yield training that was stated as one plain step of SGD, and was not quite that."""

    def situation(
        words: str, optimizer: Callable[..., torch.optim.Optimizer], right: Right, method: str = PLAIN, **how: Any
    ) -> Situation:
        def write(folder: Path) -> Given:
            model = networks.dense()
            after = trained(model, optimizer=optimizer, **how)
            np.savez(folder / "update.npz", **arrays(difference(model, after)))
            return command(folder, "update.npz", "--method", method)

        return Situation(words=words, part=PART, give=write, right=right)

    cross_entropy = nn.functional.cross_entropy
    norms, values = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
    read = Right(kind="exact", words=("weight decay of 0.01 was read off the update",))
    yield situation("weight decay that spares biases, which nobody says", without_vectors, read)
    decayed = "{name: fedavg, lr: 0.1, steps: 1, weight_decay: 0.01}"
    none = Right(kind="exact", words=("no weight decay shows, where 0.01 was stated",))
    yield situation("weight decay, stated where there was none", sgd, none, decayed)
    smoothed = partial(cross_entropy, label_smoothing=0.1)
    words = Right(kind="exact", words=("label smoothing 0.1, which was not stated",))
    yield situation("label smoothing, which nobody says", sgd, words, loss=smoothed)
    softer = Right(kind="exact", words=("gradient of the outputs was taken from the update",))
    yield situation("a temperature of two, which nobody says", sgd, softer, loss=lambda y, t: cross_entropy(y / 2, t))
    nesterov = partial(torch.optim.SGD, lr=RATE, momentum=0.9, nesterov=True)
    yield situation("Nesterov's momentum, stated as none", nesterov, EXACT)
    yield situation("a loss scaled by 1,024, never unscaled", sgd, EXACT, loss=lambda y, t: 1024 * cross_entropy(y, t))
    shorter = partial(clipped, clip=partial(norms, max_norm=0.1))
    yield situation("gradients clipped to a norm, which nobody says", shorter, EXACT)
    cut = partial(clipped, clip=partial(values, clip_value=1e-4))
    warned = Right(kind="warned", words=("does not look like a step of SGD",))
    yield situation("gradients clipped number by number, which nobody says", cut, warned)


def _of_client(words: str, write: Callable[[Path], Given], right: Right) -> Situation:
    return Situation(words=words, part=PART, give=write, right=right)


def mistakes() -> Iterator[Situation]:
    """Yield what people get wrong."""

    def weights(folder: Path) -> Given:
        np.savez(folder / "update.npz", **arrays(trained(networks.dense())))
        return command(folder, "update.npz", "--method", PLAIN, attacks=("analytic", SEARCH))

    yield _of_client("weights in place of a difference", weights, Right(kind="warned", words=("--after",)))

    def turned(folder: Path) -> Given:
        model = networks.dense()
        change = {name: -value for name, value in difference(model, trained(model)).items()}
        np.savez(folder / "update.npz", **arrays(change))
        return command(folder, "update.npz", "--method", PLAIN, attacks=("analytic", SEARCH))

    yield _of_client("the wrong sign: after minus before", turned, Right(kind="warned", words=("sign",)))

    def size(folder: Path) -> Given:
        model = networks.dense()
        np.savez(folder / "update.npz", **arrays(difference(model, trained(model, 4))))
        return command(folder, "update.npz", "--method", PLAIN, attacks=("analytic", SEARCH))

    yield _of_client("four pictures, called one", size, Right(kind="warned", words=("--batch-size",)))

    def other(folder: Path) -> Given:
        model = networks.dense()
        np.savez(folder / "update.npz", **arrays(difference(model, trained(model))))
        return command(folder, "update.npz", "--method", PLAIN, model="lenet")

    yield _of_client("another model than the update's", other, Right(kind="refused", words=("1.weight",)))


def federations() -> Iterator[Situation]:
    """Yield the mean of several clients, and what a federation recorded of one."""

    def mean(folder: Path) -> Given:
        model = networks.dense()
        parts = [difference(model, trained(model, 2, first=first)) for first in (0, 2)]
        np.savez(folder / "mean.npz", **arrays({name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}))
        words = ("mean.npz", "--clients", "2", "--batch-size", "2", "--method", PLAIN)
        return command(folder, *words, count=4, attacks=("spear", SEARCH))

    yield _of_client("the mean of two clients, two pictures each", mean, Right(kind="closer"))

    def recorded(folder: Path) -> Given:
        model = networks.dense()
        facts = TrainingFacts(optimizer="sgd", lr=RATE, steps=1, batch_size=1, examples=1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        origin = {"framework": "flower", "round": "3", "client": "7"}
        made = RecordedUpdate(before=before, after=trained(model), training=facts, origin=origin)
        made.save(folder / "round-3.npz")
        return command(folder, "round-3.npz")

    right = Right(kind="exact", words=("recorded: client: 7",))
    yield _of_client("an update that a federation recorded, facts included", recorded, right)


def defended() -> Iterator[Situation]:
    """Yield updates that clients defend, by attackers who know it."""
    pictures, labels = networks.photos()

    def situation(
        words: str, defense: Any, right: Right, attacks: Sequence[Any] = ("analytic",), count: int = 1, **settings: Any
    ) -> Situation:
        def give(folder: Path) -> Given:
            given = {"defense": defense, "attacks": [*attacks], **settings}
            return Python(model=networks.dense(), inputs=pictures[:count], targets=labels[:count], settings=given)

        return Situation(words=words, part=PART, give=give, right=right)

    search = {"name": "ig", "iterations": 300}
    both, hidden, closer = ("analytic", search), Right(kind="hidden"), Right(kind="closer")
    noise = {"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0}
    yield situation("DP-SGD, noise as large as the clip", noise, hidden, both)
    faint = {"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 1e-4}
    yield situation("DP-SGD, noise that protects nobody", faint, closer, both)
    yield situation("nine of ten numbers pruned", {"name": "prune", "ratio": 0.9}, closer, both)
    yield situation("signs alone: signSGD", "signsgd", hidden, both)
    yield situation("8 bits a number", {"name": "quantize", "bits": 8}, closer, both)
    yield situation("NVFlare's percentile filter", "nvflare-percentile", closer, both)
    nothing = {
        "name": "nvflare-svt",
        "fraction": 1.0,
        "replace": False,
        "epsilon": 1e12,
        "noise_var": 1e9,
        "gamma": 10.0,
    }
    yield situation("NVFlare's SVT filter, set so that it hides nothing", nothing, EXACT, both)
    yield situation("Flower's LocalDpMod", "flower-local-dp", hidden, both)
    yield situation(
        "secure aggregation, of one client's own model",
        {"name": "secagg", "group_size": 2},
        Right(kind="refused", words=("simulate a federation",)),
        both,
        count=2,
    )


def aggregated() -> Situation:
    """Return a federation whose server sees the mean of two clients alone."""
    group, how = "{name: secagg, group_size: 2}", "{name: fedavg, lr: 0.1, steps: 1}"
    words = ["audit", "method", how, "--dataset", "faces", "--defense", group, "--attack", SEARCH, "--count", "1"]

    def give(folder: Path) -> Given:
        return Command(model="", words=[*words, "--workers", "1"], folder=folder)

    words_of_row = "secure aggregation of two clients, faces of 28x28 pixels"
    return Situation(words=words_of_row, part=PART, give=give, right=Right(kind="closer"))


def situations() -> list[Situation]:
    """Return all of this part."""
    return [*files(), *training(), *untold(), *mistakes(), *federations(), *defended(), aggregated()]
