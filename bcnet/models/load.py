"""Where a network comes from: the zoo, timm, torchvision, or a Python file of the user's own.

Weights are freshly drawn and nothing is downloaded, unless the pretrained ones of timm or torchvision are asked for;
:mod:`bcnet.models.weights` reads those of a file.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bcnet import models as zoo
from bcnet.errors import BcnetError, did_you_mean
from bcnet.space.network import NetworkSpace, trace

Shape = tuple[int, int, int]

MOST_VALUES = 2**26  # of one input; keeps a typing error from claiming all memory
_TORCHVISION_SHAPES = {"inception_v3": (3, 299, 299)}  # its auxiliary head needs more than 224
_TORCHVISION_CLASSES = 1000
_FORMS = "zoo:NAME, timm:NAME, torchvision:NAME or path/to/file.py:NAME"


@dataclass(frozen=True)
class LoadedModel:
    """A network with what is known about it. Made by :func:`load_model`.

    ``example`` is one input, (1, C, H, W); ``classes`` is None where the network does not say; ``kept`` are the
    squeeze layers whose widths stay fixed unless asked for.
    """

    spec: str
    model: nn.Module
    example: Tensor
    input_shape: Shape
    classes: int | None = None
    kept: tuple[str, ...] = ()

    def space(
        self,
        *,
        groups: int = 20,
        base: int = 1,
        round_to: int = 1,
        least: int = 1,
        ignore: Iterable[str] = (),
        squeeze: bool = False,
    ) -> NetworkSpace:
        """The width space of this network (:func:`bcnet.space.network.trace`); with ``squeeze``, of all its widths."""
        if squeeze and not self.kept:
            raise BcnetError(f"{self.spec} keeps no squeeze widths that could be searched too")
        ignored = (*ignore, *(() if squeeze else self.kept))
        grid: dict[str, Any] = {"groups": groups, "base": base, "round_to": round_to, "least": least}
        return trace(self.model, self.example, ignore=ignored, **grid)


def load_model(
    spec: str, input_shape: Sequence[int] | None = None, classes: int | None = None, pretrained: bool = False
) -> LoadedModel:
    """The network that ``spec`` names: zoo:NAME or NAME, timm:NAME, torchvision:NAME, path/to/file.py:NAME.

    ``input_shape`` (C, H, W) overrides the network's own. ``classes`` is passed to the zoo, timm and torchvision; the
    network of a file decides for itself. ``pretrained`` takes the weights that timm or torchvision publish, from their
    cache if they are there; the last layer is a new one if ``classes`` differs from theirs.
    """
    shape = None if input_shape is None else _checked(input_shape, "the input shape")
    kind, colon, name = spec.partition(":")
    if colon and kind in _PUBLISHED:
        return _PUBLISHED[kind](name, shape, classes, pretrained)
    if pretrained:
        raise BcnetError(
            f"there are no pretrained weights of {spec}: give a file of weights, or take timm or torchvision"
        )
    if colon and kind == "zoo":
        return _from_zoo(name, shape, classes)
    if spec.endswith(".py"):
        raise BcnetError(f"{spec} is a file: write {spec}:NAME, where NAME() in it returns the network")
    if not colon:
        return _from_zoo(spec, shape, classes)
    if spec.rpartition(":")[0].endswith(".py"):
        return _from_file(spec, shape)
    raise BcnetError(f"unknown source {kind!r:.60} of a model: write {_FORMS}")


def parse_shape(text: str) -> Shape:
    """``"3,224,224"`` as (C, H, W)."""
    numbers = re.fullmatch("([0-9]{1,9}),([0-9]{1,9}),([0-9]{1,9})", text.replace(" ", ""))
    return _checked(text if numbers is None else [int(n) for n in numbers.groups()], "--input")


def _checked(shape: Any, what: str) -> Shape:
    try:
        channels, height, width = (operator.index(n) for n in shape)
    except (TypeError, ValueError):
        raise BcnetError(f"{what} must be C,H,W in whole numbers such as 3,224,224, not {shape!r:.60}") from None
    if min(channels, height, width) < 1 or math.prod((channels, height, width)) > MOST_VALUES:
        raise BcnetError(
            f"{what} is {channels},{height},{width}, but C, H and W must be at least 1 and their product at most "
            f"{MOST_VALUES}"
        )
    return channels, height, width


def _loaded(spec: str, model: nn.Module, shape: Shape, classes: int | None, **more: Any) -> LoadedModel:
    # Not zeros: without biases these would stay zero throughout the network and tell nothing about its widths.
    example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    parameter = next((p for p in model.parameters() if p.is_floating_point()), example)
    return LoadedModel(spec, model, example.to(parameter.device, parameter.dtype), shape, classes, **more)


def _from_zoo(name: str, shape: Shape | None, classes: int | None) -> LoadedModel:
    entry = zoo.find(name)
    kept = tuple(v.name for v in entry.order if v.fixed)
    model = zoo.build(name, classes=classes)
    return _loaded(f"zoo:{name}", model, shape or entry.input_shape, classes or entry.classes, kept=kept)


def _from_timm(name: str, shape: Shape | None, classes: int | None, pretrained: bool) -> LoadedModel:
    timm = _extra("timm")
    if not timm.is_model(name):
        raise BcnetError(f"timm has no model {name!r:.60}{_near(name, timm.list_models())}")
    asked = {} if classes is None else {"num_classes": classes}
    model = _built(f"timm:{name}", lambda: timm.create_model(name, pretrained=pretrained, **asked), pretrained)
    shape = shape or _checked(model.default_cfg.get("input_size"), f"the input size of timm:{name}")
    return _loaded(f"timm:{name}", model, shape, model.num_classes)


def _from_torchvision(name: str, shape: Shape | None, classes: int | None, pretrained: bool) -> LoadedModel:
    models = _extra("torchvision").models
    known = models.list_models(module=models)
    if name not in known:
        raise BcnetError(f"torchvision has no classification model {name!r:.60}{_near(name, known)}")
    asked = {} if classes is None or pretrained else {"num_classes": classes}
    weights = "DEFAULT" if pretrained else None
    model = _built(f"torchvision:{name}", lambda: models.get_model(name, weights=weights, **asked), pretrained)
    if pretrained and classes not in (None, _TORCHVISION_CLASSES):
        _replace_heads(model, classes)
    shape = shape or _TORCHVISION_SHAPES.get(name, (3, 224, 224))
    return _loaded(f"torchvision:{name}", model, shape, classes or _TORCHVISION_CLASSES)


def _replace_heads(model: nn.Module, classes: int) -> None:
    """Replace the last layers: torchvision has trained weights only for its own number of classes."""
    for path, layer in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if isinstance(layer, nn.Linear) and layer.out_features == _TORCHVISION_CLASSES:
            head: nn.Module = nn.Linear(layer.in_features, classes)
        elif isinstance(layer, nn.Conv2d) and layer.out_channels == _TORCHVISION_CLASSES:
            head = nn.Conv2d(layer.in_channels, classes, 1)
        else:
            continue
        setattr(model.get_submodule(parent), name, head)


def _extra(package: str) -> Any:
    """An optional package, or a sentence that names the extra it comes with."""
    try:
        return importlib.import_module(package)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise BcnetError(f'{package} is not installed: pip install "bcnet[{package}]"') from None
        raise BcnetError(
            f"{package} is installed but cannot be imported ({_cause(error)}): if it, or torchvision, was made for "
            f"another torch, install it anew from where torch {torch.__version__} came from"
        ) from error


def _built(spec: str, build: Callable[[], Any], pretrained: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision warns about initial weights
            return build()
    except Exception as error:
        if pretrained:
            cause = _cause(error).partition(". ")[0]
            raise BcnetError(
                f"the pretrained weights of {spec} cannot be loaded ({cause}): go online once, so that they are "
                "cached, or give a file of weights"
            ) from error
        raise BcnetError(f"{spec} cannot be built: {_cause(error)}") from error


def _near(name: str, known: Iterable[str]) -> str:
    guess = did_you_mean(name, known, 3)
    return f": {guess}" if guess else ""


def _cause(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:200] if first else type(error).__name__


def _from_file(spec: str, shape: Shape | None) -> LoadedModel:
    place, _, name = spec.rpartition(":")
    if not Path(place).is_file():
        raise BcnetError(f"there is no file {place}")
    path = Path(place).resolve()
    with _running(path, place):
        made = _member(_imported(path), place, name)
        _check_callable(made, spec)
        model = made if isinstance(made, nn.Module) else made()
        if not isinstance(model, nn.Module):
            raise BcnetError(f"{spec} returned {_a(model)}, but it must return a torch.nn.Module")
        declared = getattr(model, "input_shape", getattr(made, "input_shape", None))
        classes = getattr(model, "num_classes", None)
    if shape is None and declared is None:
        raise BcnetError(f"the input shape of {spec} is not known: pass --input C,H,W, or set {name}.input_shape")
    shape = shape or _checked(declared, f"the input_shape of {spec}")
    return _loaded(spec, model, shape, classes if isinstance(classes, int) else None)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bcnet_source_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BcnetError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look their module up
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _running(path: Path, place: str) -> Iterator[None]:
    """Run code of the user's file: it may import its neighbours, prints to stderr, and fails in one sentence."""
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except BcnetError:
        raise
    except (Exception, SystemExit) as error:
        line = _line(error, path)
        where = f"{place}, line {line}," if line else place
        raise BcnetError(f"{where} fails: {_cause(error)}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _line(error: BaseException, path: Path) -> int | None:
    """The last line of the file that took part in ``error``."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
    return lines[-1] if lines else None


def _member(module: ModuleType, place: str, name: str) -> Any:
    members = vars(module)
    if name in members:
        return members[name]
    callables = [key for key, value in members.items() if callable(value) and not key.startswith("_")]
    raise BcnetError(f"{place} has no {name!r:.60}{_near(name, callables)}")


def _check_callable(made: Any, spec: str) -> None:
    if isinstance(made, nn.Module):
        return
    if not callable(made):
        raise BcnetError(f"{spec} is {_a(made)}, but it must be a function or class that returns a torch.nn.Module")
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if needed:
        raise BcnetError(
            f"{spec} needs arguments ({', '.join(needed)}), but it is called without: give them defaults, or name a "
            "function that passes them"
        )


def _a(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


_PUBLISHED: dict[str, Callable[[str, Shape | None, int | None, bool], LoadedModel]] = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
}
