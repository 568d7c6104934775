"""From a run to files that ship: plain weights, ONNX or PyTorch's pt2, checked against the network on real inputs.

Every export writes ``widths.json`` and ``weights.safetensors`` (see :mod:`bcnet.run.serialization`) and ``MODEL.md``, a
model card (:mod:`bcnet.run.card`); ONNX and pt2 add ``model.onnx`` or ``model.pt2``. The original and the slim network
are then timed side by side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.latency.compare import compare_latency
from bcnet.latency.onnx import OnnxNetwork, any_batch, as_onnx, onnxruntime, quiet_exports, write_onnx
from bcnet.run.card import CARD, facts_of, model_card, write_metadata
from bcnet.run.folder import RunFolder
from bcnet.run.recipe import PYTHON
from bcnet.run.serialization import DESCRIPTION, WEIGHTS, Description, save
from bcnet.run.session import Run
from bcnet.utils.files import clear_errors, write_file

Format = Literal["torch", "onnx", "pt2"]
TOLERANCE = 1e-3
CHECKED = 8  # inputs that an exported network is held against its original with


def export_run(
    run: Run, to: str = "torch", out: str | Path | None = None, tolerance: float = TOLERANCE
) -> dict[str, Any]:
    """Export the slim network of ``run``, into ``out`` or RUN/export.

    Returns what was written: ``path``, ``files``, the largest ``difference`` from PyTorch (None for ``torch``, whose
    weights are the network's own), whether it takes ``any_batch``, and ``latency_ms`` of ``original`` and ``slim``.
    """
    if to not in get_args(Format):
        raise BcnetError(f"unknown format {to!r:.40}: there are {', '.join(get_args(Format))}")
    if to == "onnx":
        onnxruntime()
    folder = run.path("export") if out is None else Path(out)
    network, described = run.network(), description(run)
    save(folder, network, described)
    network, inputs = network.cpu(), (_real_inputs(run),)
    original = run.fresh(run.full).cpu().eval()
    result: dict[str, Any] = {"format": to, "path": str(folder), "difference": None, "any_batch": True}
    timed: dict[str, nn.Module] = {"original": original, "slim": network}
    files = [DESCRIPTION, WEIGHTS]
    if to == "pt2":
        files.append("model.pt2")
        result["difference"], result["any_batch"] = to_pt2(network, inputs, folder / files[-1], tolerance)
    if to == "onnx":
        files.append("model.onnx")
        result["difference"], result["any_batch"] = to_onnx(network, inputs, folder / files[-1], tolerance)
        write_metadata(folder / files[-1], described.facts)
        with as_onnx(original, inputs) as as_it_was:
            timed = {"original": as_it_was, "slim": OnnxNetwork(folder / files[-1])}
    with clear_errors(f"the network in {folder}"):
        write_file(folder / CARD, model_card(run, described.facts, files).encode())
    files.append(CARD)
    latency = compare_latency(timed, inputs[0][:1].contiguous())
    by = f"{'onnxruntime' if to == 'onnx' else 'torch'}, CPU, threads: {torch.get_num_threads()}, one input"
    return {**result, "files": files, "timed_by": by, "latency_ms": latency}


def copy_export(run: RunFolder, out: str | Path) -> dict[str, Any]:
    """Copy what a run has exported, without its network's code, to ``out``; as :func:`export_run` returns it."""
    written = run.read("export")
    with clear_errors(f"the network in {out}"):
        Path(out).mkdir(parents=True, exist_ok=True)
        for file in written["files"]:
            write_file(Path(out) / file, (run.path("export") / file).read_bytes())
    return {**written, "path": str(out)}


def description(run: Run) -> Description:
    """How to build the slim network of ``run`` again."""
    widths = dict(zip(run.space.names, map(int, run.read(f"retrain/{run.chosen}")["widths"]), strict=True))
    done = run.data.preprocessing
    return Description(
        widths=widths,
        inputs=(tuple(run.original.input_shape),),
        source=None if run.recipe.model == PYTHON else run.original.spec,
        classes=run.data.classes,
        ignore=tuple(run.recipe.ignore),
        squeeze=run.recipe.squeeze,
        normalisation=None if done is None else {"mean": done.mean, "std": done.std},
        facts=facts_of(run),
    )


def to_onnx(
    network: nn.Module, inputs: tuple[Tensor, ...], path: str | Path, tolerance: float = TOLERANCE
) -> tuple[float, bool]:
    """Write ``network`` as ONNX and compare it with onnxruntime on ``inputs``, one batch.

    Returns the largest difference of any output value, and whether the file takes batches of any size.
    """
    onnxruntime()
    whole = write_onnx(network, inputs, Path(path), _output_names(network, inputs))
    found = OnnxNetwork(path)(*inputs)
    return _compare(network, inputs, found, Path(path), tolerance), whole


def to_pt2(
    network: nn.Module, inputs: tuple[Tensor, ...], path: str | Path, tolerance: float = TOLERANCE
) -> tuple[float, bool]:
    """Write ``network`` as PyTorch's own exported program; checked and returned as by :func:`to_onnx`."""
    with quiet_exports():
        try:
            program = torch.export.export(network.eval(), inputs, dynamic_shapes=any_batch(inputs))
            whole = True
        except Exception:  # the network's own code ties it to a batch size: torch has no one class for this
            program = torch.export.export(network.eval(), inputs)
            whole = False
        torch.export.save(program, str(path))
        found = torch.export.load(str(path)).module()(*inputs)
    return _compare(network, inputs, found, Path(path), tolerance), whole


@torch.no_grad()
def _output_names(network: nn.Module, inputs: tuple[Tensor, ...]) -> list[str]:
    """What outputs are called in a file: ``logits`` where there is one of shape (n, classes), else by their number."""
    outputs = torch.utils._pytree.tree_leaves(network.eval()(*inputs))
    if len(outputs) == 1:
        return ["logits" if outputs[0].dim() == 2 else "output"]
    return [f"output{number}" for number in range(len(outputs))]


@torch.no_grad()
def _compare(network: nn.Module, inputs: tuple[Tensor, ...], found: Any, path: Path, tolerance: float) -> float:
    expected = torch.utils._pytree.tree_leaves(network.eval()(*inputs))
    outputs = torch.utils._pytree.tree_leaves(found)
    if [a.shape for a in expected] != [b.shape for b in outputs]:
        path.unlink()
        raise BcnetError(f"{path.name} gave outputs of other shapes than the network, so it was removed")
    difference = max(float((a - b).abs().max()) for a, b in zip(expected, outputs, strict=True))
    largest = max(float(a.abs().max()) for a in expected)
    if not difference <= tolerance * max(1.0, largest):
        path.unlink()
        raise BcnetError(
            f"{path.name} differed from the network by {difference:.3g} on real inputs (outputs reach {largest:.3g}), "
            f"more than the tolerance of {tolerance:g} allows, so it was removed"
        )
    return difference


def _real_inputs(run: Run) -> Tensor:
    """Some images of the run's own data, on the CPU."""
    x, _ = next(iter((run.data.test or run.data.val).batches(0, 0, "cpu")))
    return x[:CHECKED].cpu().contiguous()
