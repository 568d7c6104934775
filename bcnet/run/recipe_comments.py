"""A recipe as text with a comment for every key: what ``bcnet recipe show`` prints, to start your own from."""

from __future__ import annotations

from bcnet.run.recipe import Recipe

KEYS = {
    "version": "the version of this format",
    "about": "what the recipe is for, in a sentence",
    "model": "zoo:NAME, timm:NAME, torchvision:NAME or path/to/file.py:NAME",
    "start": "trained: keep what the network has learnt; scratch: the paper's way, from random weights",
    "weights": "a file of trained weights, .safetensors or .pt",
    "pretrained": "whether to take the weights that timm or torchvision publish",
    "input": "channels, height and width of one input; left out: the data's",
    "data": "digits, cluttered_digits, cifar10:FOLDER or imagefolder:FOLDER",
    "val_fraction": "the share of training images that are kept apart to score networks on",
    "loading": "how images are loaded and augmented",
    "groups": "into how many groups the channels of a layer are divided, so how many widths it may have",
    "base": "the smallest width, in groups",
    "round_to": "widths are multiples of this; left out: what the hardware likes with a latency budget, else 1",
    "least": "the fewest channels a layer may keep",
    "ignore": "layers that keep their width, by patterns such as stage1.*",
    "squeeze": "whether the widths of squeeze-and-excitation are searched too",
    "widen": "search around a network so many times as wide (scratch only)",
    "budgets": "what the slim network may cost, all at once: flops=50%, params=3M, memory=2MiB, latency=4ms",
    "targets": "several budgets instead, with a slim network for each",
    "paper_budgets": "the budgets that the paper reports results for",
    "latency": "how latency is measured, for a latency budget and for the comparison",
    "given": "how the given network is trained where it knows nothing yet",
    "keep": "the criterion by which channels are kept: l1, l2, bn-scale, taylor, fpgm, lamp or random",
    "reconstruct": "whether layers make up for channels that are dropped, by least squares",
    "allot": "widths to take without a search: uniform, l2-global, l2-isomorphic, ...; left out: search",
    "score": "what the search ranks by: a few steps of healing, the bare cut, or a supernet",
    "healing": "what a configuration is given before it is scored",
    "method": "how a supernet is trained: bcv2, bc, ua, autoslim, ...",
    "sampling": "which paths a training step of the supernet runs; left out: the method's own",
    "backward": "whether each path is differentiated at once (less memory) or all at the end of a step",
    "engine": "auto, plain or fused: what runs the steps of training",
    "bf16": "whether all training is in bf16; left out: on GPUs that have it",
    "supernet": "how the supernet is trained",
    "prior": "where the search in a supernet starts: the widths with the lowest training losses",
    "recalibrate": "batches for batch-norm statistics before a supernet's path is scored; 0: those of the batch",
    "rank_by": "what configurations are compared by on validation images: their score or their loss",
    "fallback": "whether scores that differ by no more than chance give way to safe widths",
    "search": "the search for widths",
    "race": "the race of the finalists; null: none, the search decides alone",
    "retrain": "how slim networks are trained",
    "distillation": "how slim networks learn from the given one; null: from the labels alone",
    "compare": "what is trained for comparison only: full, uniform, balanced, random, l2-global, ...; [] for none",
    "repeats": "how often slim networks are trained; more than once gives intervals over trainings",
    "random": "the paper's baseline of random widths, where compare names it",
    "checkpoint_minutes": "minutes between checkpoints of a training",
    "channels_last": "whether networks run with channels innermost, which most hardware likes",
    "threads": "threads of the CPU; left out: torch's own choice",
    "seed": "the one seed of everything",
}

_OPTIMISATION = {
    "epochs": "passes over the training images",
    "optimizer": "sgd or rmsprop",
    "lr": "the highest learning rate",
    "final_lr": "the rate at the end of the cosine",
    "momentum": "of the optimizer",
    "nesterov": "whether momentum looks ahead",
    "weight_decay": "pulls weights to zero",
    "decay_all": "whether biases and batch norm decay too",
    "schedule": "cosine, step or exponential",
    "milestones": "epochs at which step multiplies the rate by gamma",
    "gamma": "the factor of step and exponential",
    "every": "epochs between two factors of exponential",
    "warmup": "epochs in which the rate rises",
    "label_smoothing": "the share of every label that is spread over all classes",
    "ema": "the decay of an average of the weights; 0: none",
    "clip": "the largest norm of the gradient; 0: any",
    "head": "the rate of the last layer is at most this over its inputs; 0: as all",
    "bf16": "whether steps are computed in bf16",
}

GROUPS: dict[str, dict[str, str]] = {
    "loading": {
        "batch_size": "images of a training step, over all processes",
        "eval_batch_size": "the most images of a validation or test batch",
        "crop": "pixels of padding before a random crop; left out: the data's own",
        "flip": "whether half of the images are mirrored; left out: the data's own",
        "cutout": "the side of a random square that is blanked; 0: none",
        "channels_last": "whether batches come with channels innermost",
        "image_size": "height and width that images of a folder are resized to",
        "channels": "3 for colour, 1 for grey, of a folder of images",
        "workers": "processes that load a folder of images",
    },
    "latency": {
        "batch": "inputs at once",
        "threads": "threads of the CPU; left out: as many as the run uses",
        "backend": "torch, or onnxruntime on the CPU",
        "seconds": "the most time for each figure of the table",
    },
    "healing": {
        "steps": "steps of fine-tuning before a configuration is scored",
        "lr": "their learning rate",
        "calibration": "training batches for batch-norm statistics",
    },
    "prior": {
        "best": "how many of the best widths are taken; null: all",
        "after": "the share of training that is left out first",
    },
    "search": {
        "strategy": "evolution, neighbours, prior, markov, agent, legr, greedy, random, uniform or enumerate",
        "evaluations": "how many different configurations are scored",
        "population": "configurations of a generation",
        "retained": "how many of each generation live on as parents; 0: as many as the population",
        "feasible_only": "whether offspring beyond a budget are shrunk until they hold it",
        "pool": "offspring made for each one scored; a surrogate picks; 1: no surrogate",
        "climbers": "how many of the best climb on the surrogate",
        "explore": "how far the surrogate's doubt is explored, 0 to 1",
        "front_share": "the share of each generation that is picked for the Pareto front",
        "choose": "score: the best one; log-width (experimental): a model of all of them decides",
        "effective": "prior: the effective number of candidates per variable",
        "executor": "here, or ray to spread scoring over machines",
        "workers": "of the executor",
    },
    "race": {
        "finalists": "configurations that begin the race",
        "rounds": "after each, the better half goes on",
        "epochs": "that the rounds take together; left out: half of the training",
    },
    "distillation": {"alpha": "the teacher's share of the loss", "temperature": "how soft its answers are made"},
    "random": {"networks": "how many are tried", "epochs": "that each is trained for"},
    "sampling": {},
    **dict.fromkeys(("given", "supernet", "retrain"), _OPTIMISATION),
}


def commented(recipe: Recipe) -> str:
    """The YAML of ``recipe``: a comment above every key, and one behind every key of a group."""
    lines: list[str] = []
    group = ""
    for line in recipe.to_yaml().splitlines():
        key = line.partition(":")[0]
        if line[:1].strip() and key in KEYS:
            group = key
            lines.append(f"# {KEYS[key]}")
        elif key.strip() in GROUPS.get(group, {}) and key.startswith("  ") and not key.startswith("   "):
            line = f"{line}  # {GROUPS[group][key.strip()]}"
        lines.append(line)
    return "\n".join(lines) + "\n"
