"""Train the networks that the comparison with rivals starts from, all side by side, within a time.

    python benchmarks/rivals_base.py --data DIR --out DIR --seconds 540

How many epochs fit is derived from the measured cost of a step, so that the schedule ends in time. Under ``--out``:
NETWORK-N.safetensors (parts below 15 MB; matrices in half precision, and it is these that are evaluated) and base.json,
which says how they were trained.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from parts import Images, network, provenance, space_of
from safetensors.torch import load_file, save_file
from side_by_side import SideBySide, Training, evaluate
from torch import Tensor, nn

NETWORKS = ("mobilenetv2_cifar", "vgg19_cifar")
PART = 15_000_000
END = 12.0
"""Seconds kept for the last evaluation and for writing."""
MARGIN = 0.97
EVERY = 10
"""Epochs between looks at the held-out images."""


def half(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state as it is kept: matrices and kernels in half precision, vectors as they are."""
    return {n: (t.half() if t.ndim > 1 else t).detach().cpu().contiguous() for n, t in state.items()}


def save_base(folder: Path, name: str, state: dict[str, Tensor]) -> list[str]:
    """Write a state in parts and give their names."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in state.items():
        size += tensor.nbytes
        if size > PART and parts[-1]:
            parts.append({})
            size = tensor.nbytes
        parts[-1][key] = tensor
    names = [f"{name}-{number}.safetensors" for number in range(len(parts))]
    for part, file in zip(parts, names, strict=True):
        save_file(part, folder / file)
    return names


def load_base(folder: Path, name: str, tiny: bool = False) -> nn.Module:
    """The trained network ``name`` from the folder it was saved in."""
    model = network(name, tiny)
    files = sorted(folder.glob(f"{name}-*.safetensors"))
    state = {key: tensor.float() for file in files for key, tensor in load_file(file).items()}
    counters = {key: tensor for key, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    model.load_state_dict({**state, **{key: state[key].to(tensor.dtype) for key, tensor in counters.items()}})
    return model.eval()


class Schedule:
    """Ends a training in time: keeps its history, and takes epochs away where they turn out slower than measured."""

    def __init__(self, together: SideBySide, names: Sequence[str], end: float):
        self.together, self.names, self.end = together, names, end
        self.begun = time.perf_counter()
        self.history: list[dict[str, Any]] = []
        self.lost = [0.0] * len(names)

    def __call__(self, done: int) -> None:
        self.together.wait()
        now = time.perf_counter()
        row: dict[str, Any] = {"epoch": done, "seconds": round(now - self.begun, 2)}
        for number, (name, student) in enumerate(zip(self.names, self.together.students, strict=True)):
            total = float(student.total)
            row[name] = {"train_loss": (total - self.lost[number]) / self.together.steps}
            self.lost[number] = total
            if done % EVERY == 0:
                row[name]["val"] = evaluate(student.model, self.together.images.val, student.training.dtype)
        self.history.append(row)
        print(json.dumps(row), flush=True)
        fit = done + int((self.end - time.perf_counter()) / ((now - self.begun) / done))
        if fit < self.together.training.epochs:
            shorter = max(fit, done)
            print(f"epochs are slower than measured: {shorter} instead of {self.together.training.epochs}", flush=True)
            self.together.training = replace(self.together.training, epochs=shorter)


def kept(args: argparse.Namespace, images: Images, name: str, state: dict[str, Tensor]) -> dict[str, Any]:
    """Save a network; its files, and how good it is as they have it."""
    files = save_base(args.out, name, half(state))
    model = load_base(args.out, name, args.quick).to(images.test[0][0].device, memory_format=torch.channels_last)
    found = {"files": files, **{p: evaluate(model, getattr(images, p), args.dtype) for p in ("val", "test")}}
    print(name, found, flush=True)
    return found


def fused(args: argparse.Namespace, images: Images, training: Training, start: float) -> None:
    """Train the networks by the fused step, each for its share of the seconds."""
    from paths import Class, Lessons

    results, histories, epochs = {}, {}, {}
    for number, name in enumerate(args.networks):
        begun = time.perf_counter()
        end = begun + (start + args.seconds - END - begun) / (len(args.networks) - number)
        model = network(name, args.quick) if args.again is None else load_base(args.again, name, args.quick)
        teacher = None if args.again is None else load_base(args.again, name, args.quick).to(images.test[0][0].device)
        together = Class(space_of(model, images), training, Lessons(images, training, teacher, keep=False), 1)
        paths = together.load([(together.paths[0].widths, model.state_dict())])
        history: list[dict[str, Any]] = []
        epoch = 0
        while epoch < together.training.epochs:
            together.epoch(paths, epoch)
            epoch += 1
            loss = float(paths[0].total) / together.lessons.per_epoch
            paths[0].total.zero_()
            history.append({"epoch": epoch, "seconds": round(time.perf_counter() - begun, 2), "train_loss": loss})
            if epoch == 3:  # the first is slower, as kernels are made
                each = (history[2]["seconds"] - history[0]["seconds"]) / 2
                fit = 3 + int((end - time.perf_counter()) * MARGIN / each)
                together.training = replace(training, epochs=max(4, min(fit, args.most_epochs)))
            if epoch % EVERY == 0 or epoch == 3:
                history[-1]["val"] = paths[0].evaluate(images.val)
                print(name, f"of {together.training.epochs}", json.dumps(history[-1]), flush=True)
        results[name] = kept(args, images, name, paths[0].state())
        histories[name], epochs[name] = history, together.training.epochs
        del together, paths
    report = {
        "provenance": provenance("cpu" if args.quick else "cuda"),
        "training": {**asdict(training), "epochs": epochs},
        "seconds": time.perf_counter() - start,
        "networks": results,
        "history": histories,
    }
    (args.out / "base.json").write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None, images: Images | None = None) -> None:
    """``images`` are read unless they are given."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--seconds", type=float, default=540.0, help="in all, reading the data included")
    parser.add_argument("--most-epochs", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--warmup", type=float, default=3.0)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--cutout", type=int, default=8)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--fused", action="store_true", help="by bcnet's fused step, one network after the other")
    parser.add_argument("--again", type=Path, help="folder of trained networks to go on from, taught by themselves")
    parser.add_argument("--taught", type=float, default=0.0, help="their share of the loss")
    parser.add_argument("--cudnn-benchmark", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny networks and synthetic images on the CPU")
    args = parser.parse_args(arguments)
    device = "cpu" if args.quick else "cuda"
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    args.out.mkdir(parents=True, exist_ok=True)
    images = images or (Images.synthetic(device) if args.quick else Images.cifar10(args.data, device))
    training = Training(
        args.most_epochs, args.lr, args.batch, args.warmup, weight_decay=args.weight_decay, taught=args.taught,
        cutout=args.cutout, seed=args.seed, dtype=args.dtype, decay_all=True,
    )  # fmt: skip
    if args.fused:
        fused(args, images, training, start)
        return
    models = [network(name, args.quick) for name in args.networks]
    together = SideBySide(models, images, training, None)
    step = together.seconds_a_step(3 if args.quick else 30)
    end = start + args.seconds - (0 if args.quick else END)
    fit = int((end - time.perf_counter()) * MARGIN / (step * together.steps))
    together.training = replace(training, epochs=max(1, min(fit, args.most_epochs)))
    print(f"{1e3 * step:.2f} ms a step, {together.training.epochs} epochs of {together.steps}", flush=True)
    schedule = Schedule(together, args.networks, end)
    together.run(schedule)

    results = {
        name: kept(args, images, name, student.model.state_dict())
        for name, student in zip(args.networks, together.students, strict=True)
    }
    report = {
        "provenance": provenance(device),
        "training": asdict(together.training),
        "ms_a_step": 1e3 * step,
        "seconds": time.perf_counter() - start,
        "networks": results,
        "history": schedule.history,
    }
    (args.out / "base.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
