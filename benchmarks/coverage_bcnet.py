"""The checks that bcnet must pass on one network."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from coverage_checks import (
    LIMIT,
    Inputs,
    Pick,
    Wrong,
    agree,
    batch,
    check_training,
    counted,
    difference,
    draws,
    randomise,
    settle,
    state,
    tensors,
    zeroed,
)
from torch import Tensor, nn

from bcnet.space.network import NetworkSpace, trace
from bcnet.space.resize import sliced
from bcnet.supernet.supernet import Supernet

Row = dict[str, Any]
Check = Callable[..., bool]
ZEROS = "it differs from the original with zeros"
WEAK = 0.5  # a network of which less of its FLOPs can be reduced counts as weak
NORMS = ("aten::group_norm", "aten::layer_norm", "aten::rms_norm", "aten::_weight_norm", "aten::norm_except_dim")
REDUCING = ("mean", "sum", "var", "std", "var_mean", "amax", "amin", "max", "min", "softmax", "log_softmax", "norm",
            "linalg_vector_norm", "logsumexp")  # fmt: skip
SLIDING = ("aten::conv", "aten::avg_pool", "aten::max_pool")


def measure_bcnet(model: nn.Module, inputs: Inputs, row: Row, check: Check) -> None:
    """Trace ``model``, then check what is built at its smallest, random and largest widths, and its supernet."""
    settle(model, inputs)
    found: dict[str, NetworkSpace] = {}
    if not check("tracing", lambda: found.update(space=timed_trace(model, inputs, row))):
        return
    space = found["space"]
    row["variables"] = len(space)
    row["fixed"] = [list(pair) for pair in space.fixed]
    flops = space.costs["flops"]
    row["reducible"] = round(1 - float(flops(space.min)[0]) / max(1.0, float(flops(space.max)[0])), 4)
    row["weak"] = row["reducible"] < WEAK
    if not check("building", lambda: row.update(which_class(space))):
        return
    random = space.sample(np.random.default_rng(0))[0]
    for label, widths in (("smallest", space.min), ("random", random), ("largest", space.max)):
        network = space.build(widths)
        check(f"counting at {label} widths", lambda n=network, w=widths: check_costs(space, w, n, inputs))
        check(f"running at {label} widths", lambda n=network: check_training(n, model, inputs))
    check("other batch sizes", lambda: check_batches(space, random, model, inputs))
    full = "at full width the output differs from the original's"
    check("full width", lambda: agree(space.build(space.max, weights_of=model), model, inputs, full, pick(space)))
    check("sliced is zeroed", lambda: row.update(check_sliced(space, random, model, inputs)))
    check("supernet", lambda: check_supernet(space, random, inputs))
    check("gradients", lambda: row.update(gradients=check_gradients(space, random, inputs, row)))


def pick(space: NetworkSpace) -> Pick:
    """What of an output is compared: all of it, but where its kind is one that only a person can read."""
    return space.output if space.graph.adapted else lambda y: y


def timed_trace(model: nn.Module, inputs: Inputs, row: Row) -> NetworkSpace:
    start = time.process_time()
    try:
        with timed_export() as export, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            space = trace(model, inputs[0] if len(inputs) == 1 else inputs)
        row["told"] = next((str(w.message) for w in caught if "has gradients of its own" in str(w.message)), None)
        return space
    finally:
        row["seconds"] = round(time.process_time() - start, 2)
        row["export_seconds"] = round(sum(export), 2)


@contextmanager
def timed_export() -> Iterator[list[float]]:
    """Processor seconds of every call of torch.export inside the block."""
    plain, taken = torch.export.export, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return plain(*args, **kwargs)
        finally:
            taken.append(time.process_time() - start)

    torch.export.export = timed
    try:
        yield taken
    finally:
        torch.export.export = plain


def which_class(space: NetworkSpace) -> Row:
    """Whether networks are built from the user's class, or from the graph and why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = space.own_class
    return {"own_class": own} | ({} if own or not caught else {"graph_because": str(caught[-1].message)})


def check_costs(space: NetworkSpace, widths: np.ndarray, network: nn.Module, inputs: Inputs) -> None:
    """The network's FLOPs by torch's counter and its parameters are what the space says."""
    for name, number in counted(network, inputs).items():
        said = int(space.costs[name](widths)[0])
        # An einsum over a length of one is no matrix product to torch, and its counter then sees nothing.
        unseen = said > number and not np.array_equal(widths, space.max) and contracts(space)
        if said != number and not unseen:
            raise Wrong(f"{name} are {number:,}, but the space says {said:,}")


def contracts(space: NetworkSpace) -> bool:
    return any("einsum" in str(node.target) for node in space.graph.graph.nodes)


def check_batches(space: NetworkSpace, widths: np.ndarray, model: nn.Module, inputs: Inputs) -> None:
    """The last of three images is answered as it is alone."""
    network = space.build(widths, weights_of=model).eval()
    torch.manual_seed(0)
    three = batch(inputs, 3, noise=0.3)
    with torch.no_grad():
        together = tensors(network(*three))
    if not all(t.dim() and t.shape[0] == 3 for t in together):
        return  # outputs that are not per image (a loss, anchors) cannot be taken apart

    def last() -> list[Tensor]:
        return tensors(network(*(t[2:] for t in three)))

    differ = difference(lambda: [t[2:] for t in together], last)
    if differ > 100 * LIMIT and _independent(model, three):
        raise Wrong(f"a batch of three is answered otherwise than its images, by {differ:.1e} of the largest output")


def _independent(model: nn.Module, three: Inputs) -> bool:
    """Whether the original itself answers images one by one as it answers a batch."""
    together = difference(lambda: [t[2:] for t in tensors(model(*three))], lambda: model(*(t[2:] for t in three)))
    return together < 10 * LIMIT


def check_sliced(space: NetworkSpace, widths: np.ndarray, model: nn.Module, inputs: Inputs) -> Row:
    """The network cut from ``model`` is ``model`` with the dropped channels zeroed, but where channels are mixed."""
    network, mixing = space.build(widths, weights_of=model), mixed(space)
    try:
        agree(network, zeroed(model, taken(space, widths, model)), inputs, ZEROS, pick(space))
    except Wrong:
        if because := mixing + ["random numbers"] * draws(model, inputs):
            return {"sliced": f"not comparable: {', '.join(because)}", "mixing": mixing}
        raise
    return {"sliced": "equal", "mixing": mixing}


def taken(space: NetworkSpace, widths: np.ndarray, model: nn.Module) -> dict[str, Tensor]:
    """The flat indices of ``model``'s tensors that a cut network has, found by cutting networks filled with them."""
    digits: list[dict[str, Tensor]] = []
    original = {n: t.detach().clone() for n, t in state(model).items() if t.is_floating_point()}
    base = 2**24  # what single precision counts to
    large = any(t.numel() > base for t in original.values())
    for digit in (lambda i: i % base, lambda i: i // base)[: 1 + large]:
        with torch.no_grad():
            for name, tensor in state(model).items():
                if name in original:
                    tensor.copy_(digit(torch.arange(tensor.numel())).view(tensor.shape))
            network = space.build(widths, weights_of=model)
            digits.append({n: t.detach().long() for n, t in state(network).items() if n in original})
            for name, tensor in state(model).items():
                if name in original:
                    tensor.copy_(original[name])
    return {name: sum(base**i * digit[name] for i, digit in enumerate(digits)) for name in digits[0]}


def mixed(space: NetworkSpace) -> list[str]:
    """Operators that mix the channels of an axis that varies without weights: zeros then show in the others."""
    found = set()
    for node in space.graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name
        source = next((a for a in node.all_input_nodes if space.coupling.sizes.get(a.name)), None)
        if source is None:
            continue
        varies = {i for i, size in enumerate(space.coupling.sizes[source.name][0]) if size.terms}
        rank = len(space.coupling.sizes[source.name][0])
        if not varies:
            continue
        if name in NORMS or (name.startswith(SLIDING) and any(i >= 2 for i in varies)):
            found.add(name)
        elif name == "aten::scaled_dot_product_attention" and rank - 1 in varies and node.kwargs.get("scale") is None:
            found.add("attention scaled by its width")
        elif name.removeprefix("aten::") in REDUCING:
            dims = [a for a in (*node.args[1:], *node.kwargs.values()) if isinstance(a, (int, list, tuple))][:1]
            over = [dims[0]] if dims and isinstance(dims[0], int) else list(dims[0]) if dims else range(rank)
            if varies & {d % rank for d in over if isinstance(d, int)}:
                found.add(name)
    return sorted(found)


@torch.no_grad()
def check_supernet(space: NetworkSpace, widths: np.ndarray, inputs: Inputs) -> None:
    """A path of the supernet is the network built of its weights, on both sides."""
    net = Supernet(space, "bcv2")
    randomise(net)
    net.eval()
    many = batch(inputs, 2, noise=0.3)
    given = many[0] if len(many) == 1 else many
    for side in net.sides:
        selection = net.select(widths, side)
        stats = net.statistics(selection, given, net.views(selection))
        network = space.build(widths, weights_of=net, side=side)
        for name, buffer in network.named_buffers():
            if name in stats:
                buffer.copy_(stats[name])
        path = _Path(net, selection, stats, len(many))
        agree(path, network, many, f"its {side} path differs from the network built of it", space.output)


def check_gradients(space: NetworkSpace, widths: np.ndarray, inputs: Inputs, row: Row) -> str:
    """A path of the supernet learns as the network built of its weights, or tracing has said that it does not."""
    net = Supernet(space, "bcv2")
    randomise(net)
    network, selection, many = space.build(widths, weights_of=net), net.select(widths), batch(inputs, 2, noise=0.3)
    stats = net.statistics(selection, many[0] if len(many) == 1 else many, net.views(selection))
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            if name in stats:
                buffer.copy_(stats[name])
    path, axes = _Path(net, selection, stats, len(many)), space.coupling.axes
    names = [name for name, p in network.named_parameters() if p.requires_grad]
    for exact in (False, True):  # in double precision where rounding could explain a difference
        try:
            if exact:
                path, network = path.double(), network.double()
                many = tuple(t.double() if t.is_floating_point() else t for t in many)
            own = gradients(network, dict(network.named_parameters()), names, many, space.output)
        except Exception as error:  # in evaluation a forward may overwrite what its gradients need
            return f"not comparable: {type(error).__name__}"
        if not all(bool(g.isfinite().all()) for g in own.values()):
            return "not comparable: its own are not finite"
        found = gradients(path, dict(net.named_parameters()), names, many, space.output)
        for name in set(names) & set(axes):
            found[name] = sliced(found[name], axes[name], selection.units, net.total_units, selection.side)
        usual = float(np.median([float(g.abs().max()) for g in own.values() if g.numel()] or [0.0]))
        differ = [name for name in names if not close(found[name], own[name], usual)]
        if not differ:
            return "equal"
    if row["told"] is None:
        raise Wrong(f"a path learns otherwise than the network built of it: {len(differ)} parameters, as {differ[0]}")
    return "told"


def gradients(
    network: nn.Module, parameters: dict[str, nn.Parameter], names: list[str], inputs: Inputs, pick: Pick
) -> dict[str, Tensor]:
    """The gradients of a random sum of the outputs; zeros where there is none."""
    torch.manual_seed(0)
    outputs = [t for t in tensors(pick(network.eval()(*inputs))) if t.requires_grad]
    torch.manual_seed(0)
    sums = [(t * torch.randn(t.shape, dtype=torch.float64).to(t)).sum() for t in outputs]
    wanted = [parameters[name] for name in names]
    found = torch.autograd.grad(sums, wanted, allow_unused=True) if sums and wanted else [None] * len(wanted)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, wanted, found, strict=True)}


def close(found: Tensor, own: Tensor, usual: float) -> bool:
    """Whether gradients differ by no more than rounding does, by their own size and that of most others."""
    if found.shape != own.shape or not own.numel():
        return found.shape == own.shape
    return float((found - own).abs().max()) <= 1e-3 * float(own.abs().max()) + 1e-5 * usual


class _Path(nn.Module):
    """One path of a supernet, as a network."""

    def __init__(self, net: Supernet, selection: Any, stats: dict[str, Tensor], inputs: int):
        super().__init__()
        self.net, self.selection, self.many = net, selection, inputs > 1
        for name, value in stats.items():
            self.register_buffer(name.replace(".", "/"), value)

    def forward(self, *inputs: Tensor) -> Any:
        stats = {name.replace("/", "."): value for name, value in self._buffers.items() if value is not None}
        given = inputs if self.many else inputs[0]
        return self.net.run(self.selection, given, self.net.views(self.selection), stats)
