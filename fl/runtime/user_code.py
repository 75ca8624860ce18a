"""Code of the user's own: imported and called by its name, `module:function`, with its errors said in a line."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from fl.registry import closest_name

RUN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a method, an attack or the machine may raise in a cell; others (a key pressed, a signal) end the run."""
IMPORT_ERRORS = (*RUN_ERRORS, NameError, SyntaxError)
"""What a module may raise while it is imported."""
OUR_FOLDER = Path(__file__).resolve().parents[2]
"""Where these packages lie."""
REMOTE_CALL = re.compile(r'File "(.+)", line (\d+)')
"""A call in the traceback of another process, which comes as text."""
WEIGHT_FILES = (".pt", ".pth", ".pt2", ".bin", ".ckpt", ".safetensors", ".onnx", ".npz", ".h5")
"""How the names of files end that hold weights."""
TARGET_FORMAT = "expected module:function such as my_model:build"


@contextmanager
def place_errors(action: str) -> Iterator[None]:
    """Say of what code of the user's own raises while the block runs what it did and in which line.

    Args:
        action: that raises, in words: "data set 'mine': load()".

    Raises:
        ValueError: it raised something else; what the machine says of files and memory stays as it is.
    """
    try:
        yield
    except (ValueError, OSError, MemoryError):
        raise
    except RUN_ERRORS as error:
        origin = error_origin(error)
        where = f" ({origin[0].name}, line {origin[1]})" if origin else ""
        raise ValueError(f"{action} raised {type(error).__name__}: {error}{where}") from error


def split_target(target: str) -> tuple[str, str]:
    """Return the module and the function that `module:function` names.

    Raises:
        ValueError: it names none.
    """
    module, colon, function = target.partition(":")
    if not colon or not module or not function:
        raise ValueError(f"{TARGET_FORMAT}, got {target!r}{_target_hint(module)}")
    if module.endswith(".py") and module.startswith("/"):
        meant = f"give the file by --import {module} and name '{Path(module).stem}:{function}'"
        raise ValueError(f"{TARGET_FORMAT}, got {target!r}; {meant}")
    if module.endswith(".py"):
        meant = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ValueError(f"{TARGET_FORMAT}, got {target!r}; did you mean '{meant}:{function}'?")
    if "(" in function:
        call = f"it is called without arguments: write a function that returns {function}"
        raise ValueError(f"{TARGET_FORMAT}, got {target!r}; {call}")
    return module, function


def _target_hint(words: str) -> str:
    """Return what is missing of what names no function of a module."""
    if words.endswith(WEIGHT_FILES):
        return "; a file of weights is no network: name a function that builds it and loads them"
    module, dot, function = words.rpartition(".")
    if words.endswith(".py"):
        return "; name the function in it as well"
    return f"; did you mean '{module}:{function}'?" if dot and module and function else ""


def find_callable(target: str, *, seed: int | None = None) -> Callable[..., object]:
    """Return the function, class or model called `module:function`, looked for in the current folder first.

    Args:
        target: `module:function`.
        seed: of torch's global generator while the module is imported, as in `call_user_function`.

    Raises:
        ValueError: there is no such module or function (says what is close), or the module can't be imported.
    """
    name, function = split_target(target)
    with global_generator(seed):
        module = import_user_module(name)
    found = getattr(module, function, None)
    if not callable(found):
        likely = closest_name(function, [word for word in vars(module) if callable(getattr(module, word))])
        hint = f"; did you mean {likely!r}?" if likely else ""
        raise ValueError(f"expected a function {function!r} in {name}, found none{hint}")
    return found


def import_user_module(name: str) -> ModuleType:
    """Import a module of the user's, from the current folder or wherever Python looks.

    Raises:
        ValueError: there is none, or it can't be imported; says what it raised and in which line.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise ValueError(f"{name} needs {error.name}, which is not installed") from error
        where = f"{Path.cwd()} or among those installed"
        raise ValueError(f"no module {name!r} in {where}; give its file by --import FOLDER/{name}.py") from error
    except (*IMPORT_ERRORS, SystemExit) as error:
        _leave_on_signal(error)
        raise ValueError(_raised_message(error, name, name)) from error


def call_user_function(
    function: Callable[..., object], target: str, *, seed: int | None = None, **offers: object
) -> object:
    """Return what a function of the user's returns.

    Args:
        function: of the user's.
        target: what it is called, `module:function`.
        seed: of torch's global generator while the function runs, which is then put back; None leaves it as it is.
        **offers: arguments that the function is given if it has parameters of these names.

    Raises:
        ValueError: it raised something; says what and in which line.
    """
    name = split_target(target)[0]
    given = {key: value for key, value in offers.items() if key in _parameter_names(function)}
    try:
        with global_generator(seed):
            return function(**given)
    except (*IMPORT_ERRORS, SystemExit) as error:
        _leave_on_signal(error)
        raise ValueError(_raised_message(error, name, target, tuple(given), tuple(offers))) from error


@contextmanager
def global_generator(seed: int | None) -> Iterator[None]:
    """Seed torch's global generator for what users' code draws from it, and put it back; None leaves it as it is."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed: it seeds the generators of GPUs as well, which are not put back
        torch.default_generator.manual_seed(seed)
        yield


def user_file(module_name: str) -> Path | None:
    """Return the file of an imported module if it is the user's: of no installed package, and not Python's own."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    return None if _is_ours(path) or _is_installed(path) else path


def _is_ours(path: Path) -> bool:
    return any(path.is_relative_to(OUR_FOLDER / name) for name in ("fl", "defenses", "attacks", "eval", "hyperleak"))


def _is_installed(path: Path) -> bool:
    """Return whether a file is of an installed package, or Python's own."""
    return any(path.is_relative_to(Path(place).resolve()) for place in sysconfig.get_paths().values())


def error_origin(error: BaseException) -> tuple[Path, int] | None:
    """Return the file and the line of the last call in an error that is in code of the user's or ours.

    Calls inside installed packages and Python itself are passed over. Of an error that another process raised, the
    calls there are searched.
    """
    calls = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if error.__cause__ is not None and type(error.__cause__).__name__ == "_RemoteTraceback":
        calls += [(file, int(line)) for file, line in REMOTE_CALL.findall(str(error.__cause__))]
    for file, line in reversed(calls):
        path = Path(file).resolve()
        if path.is_file() and (_is_ours(path) or not _is_installed(path)):
            return path, line
    return None


def error_line(error: BaseException, name: str) -> int | None:
    """Return the last line of the module that took part in an error."""
    stem = f"{name.rpartition('.')[2]}.py"
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if Path(frame.filename).name == stem), None)


def _leave_on_signal(error: BaseException) -> None:
    """Raise what a handler of ours raised while the user's code ran, as a signal came."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    if isinstance(error, SystemExit) and _is_ours(Path(last).resolve()):
        raise error


def _parameter_names(function: Callable[..., object]) -> set[str]:
    """Return the names of the parameters that can be given by name; none where Python can't tell."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set()
    return {name for name, parameter in found.items() if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY}


def _raised_message(
    error: BaseException, name: str, what: str, given: tuple[str, ...] = (), offers: tuple[str, ...] = ()
) -> str:
    """Return in words what the user's module `name` raised, and in which line of it."""
    number = error_line(error, name)
    called = f"with {', '.join(given)}" if given else "without arguments"
    if offers and not given:
        called += f", or with {' and '.join(offers)} where it takes them"
    where = f" (line {number})" if number else ""
    if not number and isinstance(error, TypeError):
        where = f"; it is called {called}" + ("" if offers else ": name a function of your own that gives them")
    return f"{what} raised {type(error).__name__}: {error}{where}"
