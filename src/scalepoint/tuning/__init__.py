"""Accuracy below 8 bits: codes, scales and bias shifts are chosen from data, in one pass over it."""

# Where to look:
#
# tune.py                   the public function: cuts the model into pieces (pieces.py) and tunes one after the other
# piece_tuner.py, solve.py  one piece, and one layer of it
# steps/                    the algorithms, each registered under a name
# problem.py                what a step gets and returns; code_grids.py, grouped_layer.py, moments.py are its parts
# walk.py                   runs the float and the quantized model side by side, and stores their values
# collect.py                sums over the rows of a layer, which become moments
# reconstruct.py            gradient steps on a piece
# checkpoint.py             finished pieces in a folder

from scalepoint.results import TunedLayer, TuneReport
from scalepoint.tuning.config import TuneConfig
from scalepoint.tuning.steps import register
from scalepoint.tuning.tune import tune

__all__ = ["TuneConfig", "TuneReport", "TunedLayer", "register", "tune"]
