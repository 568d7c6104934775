"""Weights of a trained network from a file: safetensors, or a torch checkpoint, none of which is ever executed.

A state dict is found wherever a checkpoint holds it, and loaded only if every tensor fits: a network is filled as a
whole or not at all.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bcnet.errors import BcnetError

MOST_BYTES = 2**34
"""The limit of a file, packed or unpacked: keeps a wrong or hostile file from claiming all memory."""

StateDict = dict[str, Tensor]

_HOLDERS = ("state_dict", "model_state_dict", "model", "net", "network", "module", "params", "weights")
"""Where a checkpoint keeps weights; their average (``ema``) counts only if these fit less well."""
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "ema.")
_DEPTH = 3
_NAMED = 3


def load_weights(network: nn.Module, file: str | Path) -> None:
    """Fill ``network`` with the weights in ``file``: ``.safetensors``, or what ``torch.save`` wrote.

    Weights of another network, numbers that are not finite and files that hold code raise a :class:`BcnetError` and
    leave the network as it was.
    """
    path = Path(file)
    _check_file(path)
    own = network.state_dict()
    wanted = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    state = max(_states(_read(path)), key=lambda found: _fit(found, wanted), default=None)
    if state is None:
        raise BcnetError(f"{path} holds no weights: it must hold the state_dict of the network")
    _check_fit(path, type(network).__name__, state, wanted)
    for name, value in state.items():
        if not bool(value.to(wanted[name].dtype).isfinite().all()):
            raise BcnetError(f"{path} holds numbers that are not finite in {name}: take an earlier checkpoint")
    network.load_state_dict({**own, **state})


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise BcnetError(f"{path} is a folder: name the .safetensors or .pt file in it")
    if not path.exists():
        raise BcnetError(f"there is no file {path}")
    if not path.is_file():
        raise BcnetError(f"{path} is not a regular file, so it is not read")
    size = path.stat().st_size
    if not size:
        raise BcnetError(f"{path} is empty: it holds no weights")
    if size > MOST_BYTES:
        raise BcnetError(f"{path} has {size} bytes, but a file of weights may have at most {MOST_BYTES}")


def _read(path: Path) -> Any:
    """What a file holds, on the CPU; its first bytes, not its name, say what kind it is."""
    try:
        with open(path, "rb") as file:
            start = file.read(9)
        if start[8:] == b"{":
            return load_file(path)
        if start[:4] == b"PK\x03\x04":
            _check_unpacked(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about how a file was pickled
            return torch.load(path, map_location="cpu", weights_only=True)
    except BcnetError:
        raise
    except Exception as error:  # a malicious file can fail in any way
        raise BcnetError(_unreadable(path, error)) from None


def _check_unpacked(path: Path) -> None:
    with zipfile.ZipFile(path) as packed:
        size = sum(entry.file_size for entry in packed.infolist())
    if size > MOST_BYTES:
        raise BcnetError(f"{path} unpacks to {size} bytes, but a file of weights may have at most {MOST_BYTES}")


def _unreadable(path: Path, error: Exception) -> str:
    code = re.search(r"GLOBAL ([\w.]{1,80})|Unsupported (?:class|global) ([\w.]{1,80})", str(error))
    if isinstance(error, pickle.UnpicklingError) and code is not None:
        named = code.group(1) or code.group(2)
        return f"{path} holds Python objects ({named}), which are not loaded since that runs code: save the state_dict"
    if isinstance(error, PermissionError):
        return f"{path} may not be read: change its permissions"
    return f"{path} is damaged, or neither a safetensors file nor a checkpoint that torch.save wrote"


def _states(held: Any, depth: int = 0) -> Iterator[StateDict]:
    """Every dictionary of tensors in a checkpoint, the likeliest first, with and without the prefixes of wrappers."""
    if not isinstance(held, Mapping) or depth > _DEPTH:
        return
    state = {name: value for name, value in held.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if state:
        yield state
        yield from _unwrapped(state)
    names = [name for name, value in held.items() if isinstance(value, Mapping)]
    for name in sorted(names, key=lambda name: _HOLDERS.index(name) if name in _HOLDERS else len(_HOLDERS)):
        yield from _states(held[name], depth + 1)


def _unwrapped(state: StateDict) -> Iterator[StateDict]:
    """The state without one prefix of a wrapper (data parallel, compiled, a trainer's) after another."""
    inner = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    if inner.keys() != state.keys():
        yield inner
        state = inner
    for _ in range(_DEPTH):
        prefix = next((p for p in _PREFIXES if any(name.startswith(p) for name in state)), None)
        if prefix is None:
            return
        state = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        yield state


def _fit(state: StateDict, wanted: StateDict) -> tuple[int, int]:
    """How many tensors of a state the network needs, then how few others it has: the larger, the better."""
    fitting = sum(name in wanted and _fits(value, wanted[name]) for name, value in state.items())
    return fitting, fitting and -len(state)


def _fits(value: Tensor, wanted: Tensor) -> bool:
    return (
        value.shape == wanted.shape
        and value.layout == wanted.layout
        and value.is_floating_point() == wanted.is_floating_point()
        and not value.is_complex()
    )


def _check_fit(path: Path, network: str, state: StateDict, wanted: StateDict) -> None:
    missing = [name for name in wanted if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in wanted]
    wrong = [name for name in wanted if name in state and not _fits(state[name], wanted[name])]
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(wanted)} tensors {_are(missing)} missing ({_first(missing)})")
    if unexpected:
        problems.append(f"{len(unexpected)} {_are(unexpected)} unexpected ({_first(unexpected)})")
    if wrong:
        shapes = [f"{name} is {_form(state[name])}, not {_form(wanted[name])}" for name in wrong]
        problems.append(f"{len(wrong)} {'has' if len(wrong) == 1 else 'have'} another shape ({_first(shapes)})")
    if problems:
        raise BcnetError(f"{path} does not fit {network}: {', '.join(problems)}; give the weights of this very network")


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _first(names: list[str]) -> str:
    return ", ".join(f"{name:.80}" for name in names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def _form(tensor: Tensor) -> str:
    kind = "" if tensor.dtype == torch.float32 else f" of {str(tensor.dtype).removeprefix('torch.')}"
    return f"{tuple(tensor.shape)}{kind}"
