"""A network on disk without pickle: its weights as safetensors, and in ``widths.json`` how to build it again.

``widths.json`` names the source of the original network (zoo, timm or torchvision; a class of your own is passed again
when it is loaded), the width of every variable, the input and the normalisation it was trained with. Nothing that a
file names is ever run: the network of a Python file must be passed as a callable, too. A file may come from strangers,
so sizes are bounded and compared before anything of that size is allocated.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as read_tensors
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.run.weights import finite, load_into
from bcnet.space.network import NetworkSpace, trace
from bcnet.utils.files import clear_errors, digest, open_regular, parse_json, read_regular, tensor_bytes, write_file
from bcnet.utils.random_state import kept_random_state

FORMAT_VERSION = 2
DESCRIPTION, WEIGHTS = "widths.json", "weights.safetensors"
LARGEST_DESCRIPTION = 2**24  # bytes; far more than the widths of any network need
NAMED_SOURCES = ("zoo", "timm", "torchvision")
MOST_INPUT = 2**21  # values of one input, 3 x 836 x 836; to find the widths, the original is run on it


@dataclass(frozen=True)
class Description:
    """What it takes to build a network again: everything but its weights.

    ``source`` is what :func:`bcnet.models.load.load_model` takes, or None for a network given in Python; ``inputs`` has
    the shape of each input without its batch; ``ignore`` and ``squeeze`` are those the space was traced with;
    ``normalisation`` has the ``mean`` and ``std`` of every input channel, in the units of the raw images; ``facts``
    are for who uses the network without bcnet (:mod:`bcnet.run.card`).
    """

    widths: Mapping[str, int]
    inputs: tuple[tuple[int, ...], ...]
    source: str | None = None
    classes: int | None = None
    ignore: tuple[str, ...] = ()
    squeeze: bool = False
    normalisation: Mapping[str, tuple[float, ...]] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def named(self) -> bool:
        """Whether the original network can be built from its name alone."""
        return self.source is not None and self.source.partition(":")[0] in NAMED_SOURCES

    def example(self, batch: int = 1) -> tuple[Tensor, ...]:
        """Random inputs of the right shapes, always the same."""
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(batch, *shape, generator=generator) for shape in self.inputs)


def save(folder: str | Path, network: nn.Module, description: Description) -> Path:
    """Write ``network`` to ``folder``: first its weights, then ``widths.json``, which tells whether they are whole."""
    folder = Path(folder)
    tensors = network.state_dict()
    if odd := next((name for name, tensor in tensors.items() if not finite(tensor)), None):
        raise BcnetError(f"the network cannot be saved: {odd!r} holds values that are infinite or NaN")
    weights = tensor_bytes(tensors)
    contents = {
        "format": "bcnet.network",
        "version": FORMAT_VERSION,
        **asdict(description),
        "weights": {"file": WEIGHTS, "bytes": len(weights), "sha256": digest(weights)},
    }
    plain = json.loads(json.dumps(contents))
    whole = {**plain, "sha256": digest_of(plain)}
    with clear_errors(f"the network in {folder}"):
        write_file(folder / WEIGHTS, weights)
        write_file(folder / DESCRIPTION, json.dumps(whole, indent=2).encode())
    return folder


@kept_random_state()
def load(
    folder: str | Path, model: nn.Module | Callable[[], nn.Module] | None = None, *, most_input: int = MOST_INPUT
) -> nn.Module:
    """The network that was saved to ``folder``, ready for use (in evaluation mode, on the CPU).

    The original of a network from the zoo, timm or torchvision is built from its name; for any other give ``model``,
    the original network or a function that returns it. It is run on an input of the size that was saved, which may
    have ``most_input`` values.
    """
    folder = Path(folder)
    found = describe(folder)
    largest = max(math.prod(shape) for shape in found.inputs)
    if largest > most_input:
        raise BcnetError(
            f"the network in {folder} takes inputs of {largest:,} values, for which much memory may be needed: "
            f"pass most_input={largest} if you trust the file"
        )
    tensors = _weights(folder)
    space = _space(folder, found, model)
    if list(space.names) != list(found.widths):
        raise BcnetError(
            f"{folder} is of another network: its width variables are {_some(found.widths)}, "
            f"those of the given one are {_some(space.names)}"
        )
    widths = [found.widths[name] for name in space.names]
    needed, held = int(space.costs["params"](widths)[0]), sum(tensor.numel() for tensor in tensors.values())
    if needed > held:  # checked before such a large network is built
        raise BcnetError(
            f"the widths and the weights in {folder} do not belong together: {DESCRIPTION} asks for {needed:,} "
            f"parameters, {WEIGHTS} holds {held:,}"
        )
    network = space.build(widths, grow=True)
    load_into(network, tensors, folder / WEIGHTS)
    return network.eval()


def digest_of(contents: dict[str, Any]) -> str:
    """The digest of a description, whatever the order and layout of its JSON."""
    return digest(json.dumps(contents, sort_keys=True).encode())


def describe(folder: str | Path) -> Description:
    """What ``widths.json`` in ``folder`` says, checked."""
    folder = Path(folder)
    data = _json(folder)
    if data.get("format") != "bcnet.network":
        raise BcnetError(f"{folder / DESCRIPTION} describes no network of bcnet: give the folder of an export")
    if data.get("version") != FORMAT_VERSION:
        raise BcnetError(
            f"{folder} has format version {data.get('version')!r:.20}, but this bcnet reads {FORMAT_VERSION}"
        )
    if data.pop("sha256", None) != digest_of(data):
        raise BcnetError(f"{folder / DESCRIPTION} was changed after it was saved: export the network again")
    for key, (meaning, fits) in _FIELDS.items():
        if key not in data:
            raise BcnetError(f"{folder / DESCRIPTION} has no {key!r}: export the network again")
        if not fits(data[key]):
            raise BcnetError(f"{key!r} in {folder / DESCRIPTION} must be {meaning}: export the network again")
    normalisation = data["normalisation"]
    return Description(
        widths=data["widths"],
        inputs=tuple(tuple(shape) for shape in data["inputs"]),
        source=data["source"],
        classes=data["classes"],
        ignore=tuple(data["ignore"]),
        squeeze=data["squeeze"],
        normalisation=normalisation and {key: tuple(normalisation[key]) for key in ("mean", "std")},
        facts=data.get("facts", {}),
    )


def _space(folder: Path, found: Description, model: nn.Module | Callable[[], nn.Module] | None) -> NetworkSpace:
    """The width space that the network was built from."""
    from bcnet.models.load import load_model

    if model is not None:
        original = model if isinstance(model, nn.Module) else model()
        if not isinstance(original, nn.Module):
            raise BcnetError(f"model must be or return a torch.nn.Module, not {type(original).__name__}")
        return trace(original, found.example(), ignore=found.ignore)
    if not found.named or found.source is None:
        of = f" ({found.source})" if found.source else ""
        raise BcnetError(
            f"the network in {folder} was made from a class of your own{of}: pass it, as in "
            "bcnet.load(folder, model=MyNetwork)"
        )
    channels_height_width = found.inputs[0] if len(found.inputs) == 1 else ()
    return load_model(found.source, channels_height_width, found.classes).space(
        ignore=found.ignore, squeeze=found.squeeze
    )


def _weights(folder: Path) -> dict[str, Tensor]:
    path, expected = folder / WEIGHTS, _json(folder).get("weights")
    size = expected.get("bytes") if isinstance(expected, dict) else None
    if not isinstance(expected, dict) or not _whole(size, 2**40):
        raise BcnetError(f"'weights' in {folder / DESCRIPTION} must have bytes and sha256: export the network again")
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno()).st_size
            data = file.read(found) if found == size else b""
    except OSError as error:
        raise BcnetError(f"cannot read {path}: {error.strerror}") from None
    if found != size or digest(data) != expected.get("sha256"):
        how = f"it has {found} bytes rather than {size}" if found != size else "its checksum differs"
        raise BcnetError(f"{path} was damaged or exchanged after it was saved ({how}): export the network again")
    try:
        return read_tensors(data)
    except Exception:  # a malicious file can fail in any way
        raise BcnetError(f"{path} is not a safetensors file: export the network again") from None


def _json(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    try:
        data = parse_json(read_regular(path, LARGEST_DESCRIPTION))
    except OSError as error:
        raise BcnetError(f"there is no saved network in {folder} ({path.name}: {error.strerror})") from None
    except (ValueError, RecursionError):
        raise BcnetError(f"{path} is not JSON, perhaps cut short: export the network again") from None
    if not isinstance(data, dict):
        raise BcnetError(f"{path} is not a JSON object: export the network again")
    return data


def _some(names: Any) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _whole(value: object, most: int = 2**26) -> bool:
    return type(value) is int and 1 <= value <= most


def _are_widths(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(_whole(width, 2**20) for width in value.values())


def _are_inputs(value: Any) -> bool:
    shaped = isinstance(value, list) and bool(value) and all(isinstance(shape, list) and shape for shape in value)
    return shaped and all(all(map(_whole, shape)) and math.prod(shape) <= 2**26 for shape in value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_normalisation(value: Any) -> bool:
    if value is None:
        return True
    numbers = [value.get(key) for key in ("mean", "std")] if isinstance(value, dict) else [None]
    return all(isinstance(row, list) and all(isinstance(n, int | float) for n in row) for row in numbers)


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "widths": ("a map of width variables to whole numbers", _are_widths),
    "inputs": ("a list of shapes, at most 2^26 values each", _are_inputs),
    "source": ("a text or null", lambda v: v is None or isinstance(v, str)),
    "classes": ("a whole number or null", lambda v: v is None or _whole(v, 2**17)),
    "ignore": ("a list of texts", _are_texts),
    "squeeze": ("true or false", lambda v: isinstance(v, bool)),
    "normalisation": ("null, or mean and std as lists of numbers", _is_normalisation),
}
