"""The stages of a run, each a function of what the run folder holds already.

A stage reads everything from the folder, even what the stage before it just had in its hands: so it cannot matter
whether the run was stopped in between.
"""

from bcnet.run.stages.common import CHECKPOINTS
from bcnet.run.stages.compare import compare, export_network, report_run
from bcnet.run.stages.given import score_given
from bcnet.run.stages.race import race
from bcnet.run.stages.retrain import retrain_all, retrain_one
from bcnet.run.stages.search import choose_known, find
from bcnet.run.stages.supernet import train
from bcnet.run.stages.trace import trace_network

__all__ = [
    "CHECKPOINTS",
    "choose_known",
    "compare",
    "export_network",
    "find",
    "race",
    "report_run",
    "retrain_all",
    "retrain_one",
    "score_given",
    "trace_network",
    "train",
]
