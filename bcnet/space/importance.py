"""Which channels stay: the importance of every unit of every width variable, over all layers the variable couples.

A unit of a variable owns a slice of every parameter the variable runs through: filters that make it, weights that read
it, its scale in a norm. A criterion turns these slices into one number per unit; biases do not count. The scores of a
variable have mean 1, so that those of different variables can be compared; ``lamp`` is already relative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bcnet.errors import BcnetError
from bcnet.space.axis import Axis
from bcnet.space.resize import shape_at
from bcnet.utils.modes import evaluation_mode
from bcnet.utils.safe_gradients import safe_gradients

if TYPE_CHECKING:
    from bcnet.space.network import NetworkSpace

UnitScores = list[NDArray[np.float64]]
KeptUnits = list[NDArray[np.int64]]
Keep = str | Sequence[ArrayLike]

Criterion = Literal["l1", "l2", "bn-scale", "taylor", "fpgm", "lamp", "random"]
CRITERIA: tuple[str, ...] = get_args(Criterion)


def importance(space: NetworkSpace, network: nn.Module, criterion: str = "l2", *, seed: int = 0) -> UnitScores:
    """Scores of the units of every variable (one array each, higher is better), judged on ``network``'s weights.

    ``l1`` and ``l2``: the sum of absolute or squared weights; ``fpgm``: the distance of a unit's weights from those
    of all others, small near their geometric median; ``lamp``: ``l2`` relative to all units at least as important;
    ``bn-scale``: batch norm's absolute scales (``l1`` for a variable that no batch norm scales, such as a squeeze
    layer); ``random``: drawn from ``seed``. ``taylor`` needs data: see :func:`taylor`.
    """
    if criterion not in CRITERIA:
        raise BcnetError(f"the criterion is {criterion!r:.40}, but it must be one of {', '.join(CRITERIA)}")
    if criterion == "taylor":
        raise BcnetError("the criterion taylor needs gradients: call taylor(space, network, batches, loss)")
    if criterion == "random":
        rng = np.random.default_rng(seed)
        return [_relative(rng.random(v.count)) for v in space.coupling.variables]
    weights = _weights(space, network)
    if criterion == "bn-scale":
        return _scales(space, weights)
    if criterion == "fpgm":
        return _summed(space, {name: w for name, w in weights.items() if w.dim() > 1}, _distances)
    if criterion == "lamp":
        return [_lamp(row) for row in _summed(space, weights, _squares)]
    return _summed(space, weights, _squares if criterion == "l2" else _absolutes)


def taylor(
    space: NetworkSpace,
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Any]],
    loss: Callable[[Any, Any], Tensor],
) -> UnitScores:
    """First-order Taylor: the sum of ``|weight * gradient|``, the gradient that of ``loss(output, target)`` over all
    ``batches``. The network is in evaluation mode meanwhile and is left as it was."""
    weights = _weights(space, network)
    gradients = _gradients(network, set(weights), batches, loss)
    return _summed(space, {name: weights[name] * gradients[name] for name in weights}, _absolutes)


def kinds(space: NetworkSpace) -> list[int]:
    """A number for each variable, equal for variables of one kind: the same types of layers make, scale and read their
    channels, and equally often. So the hidden layers of all inverted blocks are of one kind."""
    modules = dict(space.model.named_modules())
    roles: list[list[tuple[str, ...]]] = [[] for _ in range(len(space))]
    for name, axes in space.coupling.axes.items():
        path, _, leaf = name.rpartition(".")
        layer = modules.get(path)
        grouped = "grouped" if getattr(layer, "groups", 1) > 1 else ""
        for dim, axis in enumerate(axes):
            for variable in axis.variables:
                roles[variable].append((type(layer).__name__, grouped, leaf, str(dim)))
    known: dict[tuple[tuple[str, ...], ...], int] = {}
    return [known.setdefault(tuple(sorted(role)), len(known)) for role in roles]


def kept_units(space: NetworkSpace, units: Sequence[int], keep: Keep, network: nn.Module) -> KeptUnits:
    """The units that stay at a width of ``units``, ascending, for each variable.

    ``keep`` names a criterion, or holds an array for each variable: of floating-point scores, of which the highest
    stay (the first of equal ones), or of whole numbers, the units themselves.
    """
    given = importance(space, network, keep) if isinstance(keep, str) else list(keep)
    if len(given) != len(space):
        raise BcnetError(f"keep has {len(given)} arrays, but this space has {len(space)} width variables")
    rows = [np.asarray(row) for row in given]
    return [
        _highest(row, n, v.count, v.name) if row.dtype.kind == "f" else _chosen(row, n, v.count, v.name)
        for row, n, v in zip(rows, units, space.coupling.variables, strict=True)
    ]


def _highest(scores: NDArray[Any], n: int, count: int, name: str) -> NDArray[np.int64]:
    if scores.shape != (count,) or not np.isfinite(scores).all():
        raise BcnetError(f"the scores of variable {name!r} must be {count} finite numbers, one for each of its units")
    return np.sort(np.argsort(-scores, kind="stable")[:n]).astype(np.int64)


def _chosen(units: NDArray[Any], n: int, count: int, name: str) -> NDArray[np.int64]:
    chosen = np.unique(units)
    whole = units.dtype.kind in "iu" and units.shape == (n,) == chosen.shape
    if not whole or chosen.min(initial=0) < 0 or chosen.max(initial=0) >= count:
        raise BcnetError(f"variable {name!r} must keep {n} different units out of 0..{count - 1}, got {units!r:.80}")
    return chosen.astype(np.int64)


def _weights(space: NetworkSpace, network: nn.Module) -> dict[str, Tensor]:
    """The parameters that vary, at least in single precision; biases only for variables that have nothing else."""
    found: dict[int, tuple[str, Tensor]] = {}
    given = dict(network.named_parameters(remove_duplicate=False))
    for name, _ in space.model.named_parameters(remove_duplicate=False):
        axes = space.coupling.axes.get(name)
        if axes is None:
            continue
        if name not in given or shape_at(axes, space.coupling.counts) != given[name].shape:
            problem = "has another shape" if name in given else "is missing"
            raise BcnetError(f"the parameter {name!r} {problem}: importance is judged on the network that was traced")
        found.setdefault(id(given[name]), (name, given[name].detach()))
    weights = {name: w.float() if w.element_size() < 4 else w for name, w in found.values()}
    for name, w in weights.items():
        if not bool(w.isfinite().all()):
            raise BcnetError(
                f"the parameter {name!r} holds numbers that are not finite: its channels have no importance"
            )
    told = {v for name in weights if not _bias(name) for v in _variables(space, name)}
    return {name: w for name, w in weights.items() if not _bias(name) or not told.issuperset(_variables(space, name))}


def _bias(name: str) -> bool:
    return name.rpartition(".")[2].endswith("bias")


def _variables(space: NetworkSpace, name: str) -> set[int]:
    return {v for axis in space.coupling.axes[name] for v in axis.variables}


def _blocks(tensor: Tensor, axes: Sequence[Axis], counts: Sequence[int]) -> Iterable[tuple[int, Tensor]]:
    """``(variable, weights (units, d))`` for every dimension of a parameter that the variable runs along."""
    for dim, axis in enumerate(axes):
        parts: dict[int, list[Tensor]] = {}
        start = 0
        if axis.mixed:
            segment, unit = axis.places(counts).T
            tensor = tensor.index_select(dim, torch.from_numpy(np.lexsort((unit, segment))).to(tensor.device))
        for s in axis.segments:
            length = s.repeat if s.variable is None else s.repeat * counts[s.variable]
            if s.variable is not None:
                rows = tensor.narrow(dim, start, length).movedim(dim, 0).reshape(counts[s.variable], -1)
                parts.setdefault(s.variable, []).append(rows)
            start += length
        for variable, rows_of in parts.items():
            yield variable, rows_of[0] if len(rows_of) == 1 else torch.cat(rows_of, 1)


def _summed(space: NetworkSpace, weights: dict[str, Tensor], measure: Callable[[Tensor], Tensor]) -> UnitScores:
    """``measure`` (weights (units, d) -> (units,)) summed over all parameters of each variable."""
    counts = space.coupling.counts
    total = [np.zeros(n) for n in counts]
    for name, tensor in weights.items():
        for variable, rows in _blocks(tensor, space.coupling.axes[name], counts):
            total[variable] += measure(rows).double().cpu().numpy()
    return [_relative(row) for row in total]


def _absolutes(rows: Tensor) -> Tensor:
    return rows.abs().sum(1)


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(1)


def _distances(rows: Tensor) -> Tensor:
    return torch.cdist(rows, rows).sum(1)


def _relative(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    mean = scores.mean()
    return scores / mean if mean > 0 else np.ones_like(scores)


def _lamp(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each score divided by the sum of all that are at least as large; equal scores keep their order."""
    order = np.argsort(scores, kind="stable")
    remaining = np.cumsum(scores[order][::-1])[::-1]
    found = np.empty_like(scores)
    found[order] = scores[order] / np.maximum(remaining, np.finfo(np.float64).tiny)
    return found


def _scales(space: NetworkSpace, weights: dict[str, Tensor]) -> UnitScores:
    norms = {f"{path}.weight".lstrip(".") for path, m in space.model.named_modules() if isinstance(m, _BatchNorm)}
    scales = {name: w for name, w in weights.items() if name in norms}
    if not scales:
        raise BcnetError("the criterion bn-scale needs batch norms with scales, but this network has none: take l2")
    covered = {v for name in scales for v in _variables(space, name)}
    by_scale, by_weight = (_summed(space, chosen, _absolutes) for chosen in (scales, weights))
    return [by_scale[v] if v in covered else by_weight[v] for v in range(len(space))]


def _gradients(
    network: nn.Module, names: set[str], batches: Iterable[tuple[Tensor, Any]], loss: Callable[[Any, Any], Tensor]
) -> dict[str, Tensor]:
    """The gradient of the loss by parameter, summed over batches; the network's own ``.grad`` stays as it is."""
    leaves = {name: p.detach().requires_grad_() for name, p in network.named_parameters() if name in names}
    total = {name: torch.zeros_like(p) for name, p in leaves.items()}
    seen = 0
    with evaluation_mode(network):
        for x, y in batches:
            with torch.enable_grad(), safe_gradients(x.device):
                value = loss(torch.func.functional_call(network, leaves, (x,)), y)
                found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            for name, gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    total[name] += gradient
            seen += 1
    if not seen:
        raise BcnetError("the criterion taylor needs at least one batch to take gradients on")
    return total
