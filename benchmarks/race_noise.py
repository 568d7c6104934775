"""What a race should measure after a round: a network as it is, or a copy that learnt a little more at a falling rate?
Small networks on small images, on a CPU.

    python benchmarks/race_noise.py --cifar FOLDER --bases FOLDER --out FILE.json [--networks resnet2 mobilenet1]

Eight configurations of each network inherit its weights and are fine-tuned for four epochs, with two seeds. After each
epoch: the held-out loss of the network, and of a copy after some steps more with a rate that falls to zero. What counts
is how either agrees with the test loss at the end.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import reconstruction
import torch
from reconstruction import EPOCHS, RATE, Images, network
from scipy.stats import kendalltau
from torch import Tensor, nn
from torch.nn import functional

from bcnet.search.constraints import Constraints
from bcnet.search.criteria import allot
from bcnet.search.strategies.neighbours import near
from bcnet.space.importance import importance, kinds
from bcnet.space.network import trace
from bcnet.training.reconstruction import Inheritance
from bcnet.utils.provenance import provenance

CONFIGURATIONS, SEEDS, STEPS = 8, (1, 2), 30


def annealed(net: nn.Module, images: Images, taught: list[Tensor], rate: float) -> nn.Module:
    """A copy after some steps more, its rate falling to zero."""
    twin = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    order = torch.randperm(len(images.x), generator=torch.Generator().manual_seed(9))
    for step, at in enumerate(order.split(reconstruction.BATCH)[:STEPS]):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / STEPS)
        output, goal = twin(images.x[at]), functional.softmax(taught[0][at] / 4, 1)
        loss = functional.kl_div(functional.log_softmax(output / 4, 1), goal, reduction="batchmean")
        loss = 0.1 * functional.cross_entropy(output, images.y[at]) + 0.9 * 16 * loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return twin


@torch.no_grad()
def loss_of(net: nn.Module, pair: tuple[Tensor, Tensor]) -> float:
    net.eval()
    return float(functional.cross_entropy(torch.cat([net(x) for x in pair[0].split(500)]), pair[1]))


def rows_of(name: str, base: Path, images: Images) -> list[dict[str, Any]]:
    full = network(name.rstrip("0123456789"))
    full.load_state_dict(torch.load(base / f"{name}.pt", weights_only=True))
    space = trace(full.eval(), images.x[:2], check=False)
    constraints, scores = Constraints(space, space.costs, [reconstruction.BUDGET]), importance(space, full, "l2")
    inherit = Inheritance(space, full, [(x, None) for x in images.x[:512].split(128)])
    rules = np.stack([constraints.uniform(), allot(constraints, scores, "isomorphic", kinds(space))])
    others = near(constraints, rules, CONFIGURATIONS - len(rules), np.random.default_rng(5))
    with torch.no_grad():
        taught = [torch.cat([full(x) for x in some.split(500)]) for some in (images.x, images.x.flip(3))]
    found = []
    for number, widths in enumerate(np.concatenate([rules, others])):
        for seed in SEEDS:
            net, seen = inherit(widths, scores), [0]

            def after(net: nn.Module = net, seen: list[int] = seen) -> tuple[float, float]:
                seen[0] += 1
                rate = max(1e-3, RATE * 0.5 * (1 + np.cos(np.pi * seen[0] / EPOCHS)))
                return loss_of(net, images.held), loss_of(annealed(net, images, taught, rate), images.held)

            curve = reconstruction.train(net, images, EPOCHS, RATE, seed, taught, after)
            row = {"network": name, "configuration": number, "seed": seed, "held-out": curve}
            found.append({**row, "test": loss_of(net, images.test)})
            print(json.dumps(found[-1]), flush=True)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each epoch and way: the deviation over seeds against that between configurations, and Kendall with the mean
    test loss of the configuration."""
    held = np.array([row["held-out"] for row in rows]).reshape(-1, len(SEEDS), EPOCHS, 2)
    test = np.array([row["test"] for row in rows]).reshape(-1, len(SEEDS)).mean(1)
    found: dict[str, Any] = {}
    for way, column in (("as it is", 0), ("annealed", 1)):
        for epoch in range(EPOCHS):
            some = held[:, :, epoch, column]
            noise = float(np.sqrt(some.var(1, ddof=1).mean()))
            agree = [float(kendalltau(some[:, s], test)[0]) for s in range(len(SEEDS))]
            found[f"{way}, epoch {epoch + 1}"] = {
                "over seeds": noise, "between": float(some.mean(1).std(ddof=1)), "Kendall": agree
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--bases", type=Path, required=True, help="the networks of benchmarks/reconstruction.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=["resnet2", "mobilenet1"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    images, done = Images(args.cifar), {}
    for name in args.networks:
        rows = rows_of(name, args.bases, images)
        done[name] = {"summary": summary(rows), "rows": rows}
        args.out.write_text(json.dumps({"provenance": provenance("cpu"), **done}, indent=1) + "\n")
        print(json.dumps(done[name]["summary"], indent=1), flush=True)


if __name__ == "__main__":
    main()
