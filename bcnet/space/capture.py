"""The graph of any network, for any batch size."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map

from bcnet.errors import BcnetError, first_line
from bcnet.space.handwritten import Handwritten, unmark
from bcnet.space.outputs import logits
from bcnet.space.state import duplicate, keep_as_buffer, plain_tensors
from bcnet.space.tidy import lift_numbers, tidy
from bcnet.space.torch_export import Arguments, cause, exported, tensors_in

Example = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Capture:
    """A network as a graph of operators; parameters and buffers are placeholders.

    ``state_of`` maps a placeholder's name to the name of its parameter or buffer, ``inputs`` are the
    placeholders of the user's inputs, ``batch`` is the batch size the shapes were recorded with, ``given`` what
    the network was called with, and ``dynamic`` says whether the graph takes other batch sizes too. ``output``
    is how the outputs are put together; ``adapted`` says that they are only what an adapter picks from them.
    ``parts`` are graphs within the graph, ``plain`` the names of buffers that the network keeps as plain attributes,
    ``numbers`` the indices of channels that the forward itself writes down. ``functions`` are calls of functions with
    gradients of their own, which networks make too; ``by_hand`` says that there may be such gradients, ``lost`` are the
    parameters that learn otherwise than in the network itself.
    """

    graph: fx.Graph
    state_of: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    batch: int
    given: Arguments
    dynamic: bool
    output: TreeSpec
    adapted: bool = False
    parts: Mapping[str, nn.Module] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    functions: tuple[Handwritten, ...] = ()
    by_hand: bool = False
    lost: tuple[str, ...] = ()

    @property
    def plain_operators(self) -> Capture:
        """The graph without calls of functions that have gradients of their own."""
        return replace(self, functions=())

    @property
    def used(self) -> set[str]:
        """Names of the parameters and buffers that the output, or something written in place, depends on."""
        return self._reached()

    @property
    def unlearned(self) -> set[str]:
        """Those of them that no gradient of the output reaches."""
        return self.used - self._reached(torch.ops.aten.detach.default)

    def _reached(self, stop: Any = None) -> set[str]:
        reached: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            ends = node.op == "placeholder" or node.target is stop
            if not ends and (node in reached or node.op == "output" or node.is_impure()):
                reached.update(node.all_input_nodes)
        return {self.state_of[node.name] for node in reached if node.name in self.state_of}

    def with_constants(self, tensors: Mapping[str, Tensor]) -> Capture:
        """The graph with these tensors of its state as constants."""
        held = {node: tensors[name] for node, name in self.state_of.items() if name in tensors}
        left = {node: name for node, name in self.state_of.items() if node not in held}
        numbers = {name: tensor for name, tensor in self.numbers.items() if name not in tensors}
        return replace(self, state_of=left, constants=self.constants | held, numbers=numbers)


def capture(
    model: nn.Module, example: Example, *, training: bool = False, output: Callable[[Any], Any] | None = None
) -> Capture:
    """Export ``model``, in evaluation mode by default, on ``example`` (see :func:`arguments`)."""
    given = checked_arguments(model, example)
    ran = duplicate(model).train(training)
    before = plain_tensors(ran)
    result = _run(ran, given)
    plain = tuple(name for name, tensor in plain_tensors(ran).items() if tensor is before.get(name))
    foreign = any(not isinstance(leaf, (Tensor, int, float, bool, str)) for leaf in tree_leaves(result))
    adapt = output if output is not None else logits if foreign else None
    if not tensors_in(result) and adapt is None:
        raise BcnetError(f"{type(model).__name__} gives no tensor: its forward must return its outputs")

    def fresh() -> nn.Module:
        """A copy that has not run yet, so that it holds nothing of an earlier batch."""
        network = _with_constants(duplicate(model).train(training), ran)
        for name, tensor in plain_tensors(network).items():
            if name in plain:
                keep_as_buffer(network, name, tensor)
        if adapt is not None:
            forward = network.forward
            network.forward = lambda *args, **kwargs: adapt(forward(*args, **kwargs))
        return network

    program, given, dynamic = _captured(fresh, given)
    batch = tensors_in(given)[0].shape[0]
    if not dynamic and not training:
        warnings.warn(
            f"the forward of {type(model).__name__} does other things for other batch sizes, so that its graph takes "
            f"batches of {batch} only, and it can have no supernet: its forward must not loop over the batch",
            stacklevel=4,
        )
    tidy(program.graph_module)
    signature = program.graph_signature
    lifted = signature.inputs_to_lifted_tensor_constants
    constants = {name: program.constants[target].detach() for name, target in lifted.items()}
    numbers = {} if training else lift_numbers(program.graph, constants)
    calls, hooked = (program.graph_module.meta[key] for key in ("calls", "hooked"))
    functions = unmark(program.graph, calls, constants)
    return Capture(
        program.graph,
        {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **{name: name for name in numbers}},
        constants,
        tuple(str(name) for name in signature.user_inputs),
        batch,
        given,
        dynamic,
        program.call_spec.out_spec,
        adapt is not None,
        {n.target: getattr(program.graph_module, n.target) for n in program.graph.find_nodes(op="get_attr")},
        plain,
        numbers,
        functions,
        bool(calls) or hooked,
    )


def _captured(fresh: Callable[[], nn.Module], given: Arguments) -> tuple[torch.export.ExportedProgram, Arguments, bool]:
    """The exported network, what it was exported on, and whether it takes any batch size."""
    more = one_more(given)
    frozen: list[torch.export.ExportedProgram] = []
    for tried in (given, more):  # the size a network has stored counts as fixed, so another is tried
        with contextlib.suppress(Exception):  # after any failure fixed sizes are tried, and their failure is reported
            program = exported(fresh(), tried, dynamic=True)
            if not _frozen(program):
                return program, tried, True
            frozen.append(program)
    if len(frozen) < 2:
        network = fresh()
        try:
            frozen = [exported(network, given, dynamic=False)]
        except Exception as error:
            raise BcnetError(f"torch.export cannot capture {type(network).__name__}: {cause(error)}") from error
        with contextlib.suppress(Exception):  # a network that runs on no other batch size keeps this one
            frozen.append(exported(fresh(), more, dynamic=False))
    return frozen[0], given, len(frozen) == 2 and _free_batch(frozen[0], frozen[1], given)


def used_in_training(model: nn.Module, example: Example, names: Iterable[str]) -> bool:
    """Whether training mode reads one of these parameters; assumed where the network does not run."""
    args, kwargs = checked_arguments(model, example)
    network = duplicate(model).train()
    parameters = dict(network.named_parameters(remove_duplicate=False))
    wanted = [parameters[n].requires_grad_() for n in names if n in parameters and parameters[n].is_floating_point()]
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices={p.device for p in wanted if p.is_cuda}):
            outputs = [t.sum() for t in tensors_in(network(*args, **kwargs)) if t.requires_grad]
            found = torch.autograd.grad(torch.stack(outputs).sum(), wanted, allow_unused=True)
    except Exception:  # then torch.export says why
        return True
    return any(gradient is not None for gradient in found)


def one_more(given: Arguments) -> Arguments:
    """The arguments with one more image."""
    batch = tensors_in(given)[0].shape[0]

    def grown(leaf: Any) -> Any:
        return torch.cat([leaf, leaf[:1]]) if isinstance(leaf, Tensor) and leaf.shape[:1] == (batch,) else leaf

    return tree_map(grown, given)


def _frozen(program: torch.export.ExportedProgram) -> bool:
    """Whether the graph turned the batch size into a plain number."""
    inputs = set(program.graph_signature.user_inputs)
    values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in inputs]
    sizes: list[Any] = [v.shape[0] for v in values if isinstance(v, Tensor) and v.dim()]
    return not any(isinstance(size, torch.SymInt) and not size.node.expr.is_number for size in sizes)


def _free_batch(program: torch.export.ExportedProgram, other: torch.export.ExportedProgram, given: Arguments) -> bool:
    """Free a graph of the batch size it was frozen at, and say whether that was possible.

    Its twin for one more image shows which numbers depend on the batch: ``a + b * batch`` replaces them.
    """
    batch, twin = tensors_in(given)[0].shape[0], other.graph
    pairs = list(zip(program.graph.nodes, twin.nodes, strict=False))
    if len(twin.nodes) != len(program.graph.nodes) or any(a.target != b.target for a, b in pairs if a.op != "output"):
        return False
    inputs = set(program.graph_signature.user_inputs)
    source = next(a for a, _ in pairs if a.name in inputs and isinstance(a.meta.get("val"), Tensor))
    first = next(a for a, _ in pairs if a.op != "placeholder")
    with program.graph.inserting_before(first):
        size = program.graph.call_function(torch.ops.aten.sym_size.int, (source, 0))
        size.meta["val"] = batch
    for a, b in pairs:
        if a.op == "call_function":
            with program.graph.inserting_before(a):
                a.args, a.kwargs = (_varied(x, y, size, batch) for x, y in ((a.args, b.args), (a.kwargs, b.kwargs)))
    return True


def _varied(a: Any, b: Any, size: fx.Node, batch: int) -> Any:
    """An argument in which numbers that differ between two batch sizes are functions of the batch size."""
    if isinstance(a, (list, tuple)):
        return type(a)(_varied(x, y, size, batch) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return {key: _varied(value, b[key], size, batch) for key, value in a.items()}
    if type(a) is not int or a == b:
        return a
    slope = b - a
    scaled = size if slope == 1 else size.graph.call_function(operator.mul, (size, slope))
    scaled.meta["val"] = slope * batch
    if a == slope * batch:
        return scaled
    moved = size.graph.call_function(operator.add, (scaled, a - slope * batch))
    moved.meta["val"] = a
    return moved


def arguments(example: Example) -> Arguments:
    """What a network is called with: a tensor, a sequence of arguments, or a mapping of named ones."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    return tuple(example), {}


def check_network(model: nn.Module) -> None:
    """Raise a :class:`BcnetError` if this is not a network whose widths could change."""
    if isinstance(model, torch.jit.ScriptModule):
        raise BcnetError(
            "the network is a TorchScript module, which has no Python code left: give the one it was made of"
        )
    kinds = {name: type(module).__module__ for name, module in model.named_modules()}
    whole = next((n for n, kind in kinds.items() if kind.startswith("torch.ao.nn.") and ".quantized" in kind), None)
    if whole is not None:
        raise BcnetError(f"layer {whole} of the network is quantized: slim it before that, and quantize the slim one")
    odd = next((name for name in model.state_dict() if any(sign in name for sign in '"\\\n\r')), None)
    if odd is not None:
        raise BcnetError(f"{odd!r:.80} has a quote, backslash or line end in its name: rename that layer")
    if any(is_lazy(p) for p in (*model.parameters(), *model.buffers())):
        raise BcnetError(
            f"{type(model).__name__} has layers that take their sizes from the first input: run it once on the example "
            "input first"
        )


def checked_arguments(model: nn.Module, example: Example) -> Arguments:
    """The arguments, of batch size 2 or more: export would freeze a batch of 1."""
    if not isinstance(model, nn.Module):
        raise BcnetError(f"expected a torch.nn.Module, but got {type(model).__name__}")
    check_network(model)
    if not isinstance(example, (Tensor, Sequence, Mapping)) or isinstance(example, str):
        raise BcnetError(f"the example input must be a tensor, a tuple or a dictionary, not {type(example).__name__}")
    given = arguments(example)
    tensors = tensors_in(given)
    if not tensors or not all(t.dim() for t in tensors):
        raise BcnetError("the example input must be a batch as a tensor, or a tuple or dictionary with such tensors")
    devices = {str(p.device) for p in model.parameters()}
    here = {str(t.device) for t in tensors}
    if devices and len(devices | here) > 1:
        raise BcnetError(
            f"the model is on {', '.join(sorted(devices))} but the example input on {', '.join(sorted(here))}: "
            "move both to one device"
        )
    if tensors[0].shape[0] == 1:
        return tree_map(lambda t: torch.cat([t, t]) if isinstance(t, Tensor) and t.shape[0] == 1 else t, given)
    return given


def _with_constants(network: nn.Module, ran: nn.Module) -> nn.Module:
    """The network with the integers that it keeps as buffers (a stride, a padding) created where they are read, so that
    torch.export knows their values; those that change when it runs, as they did in its copy ``ran``, stay buffers."""
    after = dict(ran.named_buffers(remove_duplicate=False))
    for path, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        numbers = {name: _number(b) for name, b in module._buffers.items() if name != "num_batches_tracked"}
        kept = {
            n: v for n, v in numbers.items() if v is not None and v == _number(after.get(f"{path}.{n}".lstrip(".")))
        }
        if kept:
            read = {name: property(partial(_made_anew, number=number)) for name, number in kept.items()}
            module.__class__ = type(type(module).__name__, (type(module),), read)
        for name in kept:
            del module._buffers[name]
    return network


def _number(buffer: Tensor | None) -> int | None:
    """The integer that a buffer holds; None for any other buffer."""
    if buffer is None or buffer.dim() or buffer.is_meta or buffer.dtype not in (torch.int32, torch.int64):
        return None
    return int(buffer)


def _made_anew(module: nn.Module, number: int) -> Tensor:
    return torch.tensor(number)


@torch.no_grad()
def _run(network: nn.Module, given: Arguments) -> Any:
    try:
        return network(*given[0], **given[1])
    except Exception as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in(given))
        raise BcnetError(
            f"{type(network).__name__} does not run on an example input of shape {shapes}: {first_line(error)}; "
            "give it an input that it takes"
        ) from error
