"""Capture a model as one readable graph. Its nodes are modules that own the parameters under their original names."""

from scalepoint.graph.capture import capture
from scalepoint.graph.check import check_graph
from scalepoint.graph.kinds import ACTIVATIONS, WEIGHTED
from scalepoint.graph.operations import Operation, Reference

__all__ = ["ACTIVATIONS", "WEIGHTED", "Operation", "Reference", "capture", "check_graph"]
