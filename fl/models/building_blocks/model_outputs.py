"""Picks, of what a user's network returns, the one tensor that the loss is taken of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fl.registry import closest_name
from fl.runtime import user_code

LOGITS = "logits"
"""What the tensor is called that is taken by itself."""
Choice = str | int | Callable[[Any], Tensor] | None
"""Which part of an output: its name, its place, `module:function` or a callable that returns it; None chooses."""


@dataclass(frozen=True)
class OutputHook:
    """Picks one tensor of what a network returns, as a forward hook: so no parameter changes its name.

    A tensor (B,) becomes (B, 1), so that outputs have a dimension beside the batch's.

    Attributes:
        choice: which part.
        dimensions: of outputs, the batch's included, of a network that takes this one off a single example (by
            `squeeze()`, say); None for others.
    """

    choice: Choice = None
    dimensions: int | None = None

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Tensor:
        """Return the tensor."""
        found = choose_output(output, self.choice)
        if self.dimensions is not None and found.ndim == self.dimensions - 1:
            found = found[None]
        return found[:, None] if found.ndim == 1 else found


def choose_output(output: Any, choice: Choice = None) -> Tensor:
    """Return the tensor of an output that is meant.

    A tensor stands for itself. Of a dictionary, a named tuple or an object with fields it is `logits`, of anything the
    only floating-point tensor that there is.

    Args:
        output: of a network.
        choice: its name or place, or a function of the whole output.

    Raises:
        ValueError: there is no such part, or none to be chosen by itself; names those that there are.
    """
    parts = _parts(output)
    if callable(choice) or (isinstance(choice, str) and ":" in choice):
        call = choice if callable(choice) else user_code.find_callable(choice)
        found = call(output)
        if not isinstance(found, Tensor):
            raise ValueError(f"expected output as a function that returns a tensor, got {type(found).__name__} from it")
        return found
    if choice is not None:
        return _named_part(output, parts, choice)
    if isinstance(output, Tensor):
        return output
    if isinstance(parts.get(LOGITS), Tensor):
        return parts[LOGITS]
    tensors = [value for value in parts.values() if isinstance(value, Tensor) and value.is_floating_point()]
    if len(tensors) == 1:
        return tensors[0]
    raise ValueError(
        f"expected a model that returns a tensor, or one of them called {LOGITS!r}, got {_describe(output, parts)}; "
        "say which by output= (--output): a name, a place such as 0, or a function of the whole output. For a loss of "
        "several (a VAE's) it puts them into one, lambda found: torch.cat([part.flatten(1) for part in found], 1), and "
        "a loss function of your own takes that apart"
    )


def _named_part(output: Any, parts: Mapping[Any, Any], choice: str | int) -> Tensor:
    key = int(choice) if isinstance(choice, str) and choice.isdecimal() and choice not in parts else choice
    if isinstance(key, int) and key not in parts and 0 <= key < len(parts):
        key = list(parts)[key]
    found = parts.get(key)
    if isinstance(found, Tensor):
        return found
    if key in parts:
        raise ValueError(f"expected output {choice!r} to be a tensor, got {type(found).__name__}")
    if isinstance(output, Tensor):
        raise ValueError(
            f"expected a model with several outputs beside output={choice!r}, got one tensor; leave it out"
        )
    close = closest_name(str(choice), [str(name) for name in parts])
    hint = f"; did you mean {close!r}?" if close else ""
    raise ValueError(f"expected an output {choice!r}, got {_describe(output, parts)}{hint}")


def _parts(output: Any) -> dict[Any, Any]:
    """Return the parts of an output by name or place."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return dict(zip(output._fields, output, strict=True))
    if isinstance(output, Sequence) and not isinstance(output, str):
        return dict(enumerate(output))
    if isinstance(output, Tensor) or not hasattr(output, "__dict__"):
        return {}
    return {name: value for name, value in vars(output).items() if not name.startswith("_")}


def _describe(output: Any, parts: Mapping[Any, Any]) -> str:
    """Say what an output is, with the names and shapes of its parts."""
    if not parts:
        return type(output).__name__
    shown = ", ".join(f"{name!r} {_shape(value)}" for name, value in parts.items())
    return f"{type(output).__name__} of {shown}"


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
