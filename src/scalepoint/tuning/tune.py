"""Chooses codes, scales and bias shifts of the quantized weights, so that the model computes what the float model does.

    model --cut--> pieces --one after the other: PieceTuner--> codes, scales, bias shifts, rows of the report

The float parameters are never written. A finished piece is stored in a folder, so that a run can be continued. Words of
this package:

stream        all values of the float model ("exact"), or of the quantized model with the codes chosen so far ("noisy")
walk, pass    run a node on all batches in both streams, and store its outputs; every node is passed once
piece         a layer or a block; its entries are the nodes outside that it reads, its exits the nodes that others read
nearest       codes rounded to nearest: those of a piece before it is tuned
error         of the exits of a piece in the noisy stream, on held-out samples
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from scalepoint import distributed
from scalepoint.errors import CalibrationError
from scalepoint.quantize.batches import Data
from scalepoint.quantize.calibrate import OnNan, freeze
from scalepoint.quantize.fingerprint import fingerprint_model
from scalepoint.quantize.operations import EMBEDDING
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.record import record_of, update_record
from scalepoint.results import TunedLayer, TunedPiece, TuneReport
from scalepoint.support.output_folder import check_path
from scalepoint.support.progress import phase
from scalepoint.support.torch_state import serialized
from scalepoint.tuning.checkpoint import Checkpoint, PieceResult, StoredPiece, compute_fingerprint
from scalepoint.tuning.collect import RowCollector
from scalepoint.tuning.config import TuneConfig
from scalepoint.tuning.piece_tuner import PieceTuner, needs_range
from scalepoint.tuning.pieces import Piece, Unit, cut_into_pieces
from scalepoint.tuning.state import copy_states, restore_states
from scalepoint.tuning.walk import StreamWalk
from scalepoint.tuning.weight_provider import WeightProvider, load_weights, release_weights

PROVIDED_WEIGHTS_NAN_HINT = (
    "Its weights are finite, so values overflow before it: check the checkpoint and its config.json by running it in "
    "transformers"
)
WHOLE_MODEL = "all"  # name of the whole model in the checkpoint, where pieces are numbered


@serialized
@distributed.participating()
def tune(
    model: fx.GraphModule,
    data: Data,
    config: TuneConfig | Mapping[str, Any] | None = None,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    max_batches: int | None = None,
    on_nan: OnNan = "error",
    progress: bool | None = None,
    weight_provider: WeightProvider | None = None,
) -> TuneReport:
    """Choose better codes for the quantized weights of a calibrated model than rounding to nearest gives.

    The model is changed in place and its weights stay frozen. No layer ends worse than with rounding to nearest on
    held-out rows, and no block on held-out samples.

    Args:
        model: A calibrated model with frozen weights.
        data: As for `calibrate`.
        config: Which steps to run, and their settings.
        folder: Store every finished piece here, so that an interrupted run can be resumed.
        resume: Continue after the last finished piece in `folder`.
        max_batches: Use at most this many batches.
        on_nan: What to do with batches that contain NaN or infinity.
        progress: Show a progress bar. None shows it on a terminal only.
        weight_provider: Loads the weights of one piece at a time, for models that do not fit into memory. Ranges of
            activations are then observed during the walk, and the codes are only in `folder`.

    Returns:
        What was done to each layer.

    Example:
        >>> report = tune(model, batches, TuneConfig(steps=("intercept", "gptq")))  # doctest: +SKIP
    """
    if not isinstance(config, TuneConfig):
        config = TuneConfig(**(config or {}))
    config.check(has_weight_provider=weight_provider is not None)
    if folder is not None:
        check_path(Path(folder), "folder")
    names = record_of(model).names
    if weight_provider is None:
        freeze(model)
        if record_of(model).config.correct_bias is None:
            _remove_bias_correction(model)
    start = time.perf_counter()
    walk = StreamWalk(model, memory=config.memory, keeps_outputs=weight_provider is None)
    try:
        if config.steps or any(map(needs_range, walk.stub_nodes)):
            _check_has_data(data, config)
            walk.read_data(model, data, max_batches=max_batches, skip_nan=on_nan == "skip", progress=progress)
        inputs_fingerprint = ""
        if folder is not None:
            model_fingerprint = _fingerprint_model(model, weight_provider)
            inputs_fingerprint = compute_fingerprint(model_fingerprint, walk, config.model_dump_json())
        checkpoint = Checkpoint.start(None if folder is None else Path(folder), inputs_fingerprint, resume=resume)
        run = _TuningRun(model, walk, config, checkpoint, names, weight_provider)
        run.run(progress)
    finally:
        walk.activation_store.close()
    update_record(model, tuned_threads=torch.get_num_threads())
    return TuneReport(
        layers=tuple(run.rows),
        left=run.skipped,
        batches=len(walk.batch_owners),  # batches of all ranks; walk.batch_count has those of this rank
        samples=walk.sample_count,
        seconds=time.perf_counter() - start,
        pieces=tuple(run.pieces),
    )


def _remove_bias_correction(model: fx.GraphModule) -> None:
    """Drop the bias shifts of calibration: tuning compares with the nearest codes alone, and chooses its own shifts."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer) and layer.has_bias_correction:
            layer.set_bias_shift(None)


def _check_has_data(data: Data, config: TuneConfig) -> None:
    """Raise CalibrationError if ranges must be observed and the data is empty. (Without steps it may be empty.)"""
    if not config.steps and isinstance(data, Sequence) and not data:
        raise CalibrationError(
            "no calibration data: it is needed for the ranges of activations with stored scales. Pass data=, or choose "
            "one scale per token, which needs none"
        )


def _fingerprint_model(model: fx.GraphModule, weight_provider: WeightProvider | None) -> object:
    """Return a fingerprint of the model and its quantizers. Only rank 0, which reads the folder, computes it."""
    if not distributed.is_main():
        return None
    if weight_provider is None:
        return fingerprint_model(model)
    metadata = record_of(model)
    return [
        weight_provider.fingerprint,
        metadata.config.to_dict(),
        None if metadata.target is None else metadata.target.file_metadata,
    ]


@dataclass
class _TuningRun:
    """One run of `tune`: cuts the model into pieces, tunes each or loads its result, and collects the report.

    Attributes:
        model: The calibrated model.
        walk: Its two streams.
        config: The settings.
        checkpoint: Stores the finished pieces.
        names: Name of every node.
        weight_provider: Loads weights piece by piece; None if they are in memory.
        rows, pieces: Rows of the report.
        skipped: Layers that were not tuned -> the reason.
    """

    model: fx.GraphModule
    walk: StreamWalk
    config: TuneConfig
    checkpoint: Checkpoint
    names: dict[str, str]
    weight_provider: WeightProvider | None = None
    rows: list[TunedLayer] = field(default_factory=list)
    pieces: list[TunedPiece] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        collector = RowCollector(self.walk, self.config.rows, self.config.holdout, self.names)
        if self.weight_provider is not None:
            collector.nan_hint = PROVIDED_WEIGHTS_NAN_HINT
        # Weights of a provider are not in memory during calibration, so their model was not calibrated.
        observes_ranges = self.weight_provider is not None
        self.tuner = PieceTuner(self.walk, collector, self.config, self.names, observes_ranges)

    def run(self, progress: bool | None) -> None:
        """Tune all pieces; then the whole model at once, if a step asks for that."""
        uses = self.tuner.uses
        if self.tuner.model_steps:
            self.walk.pin(self.walk.placeholders)  # read again at the end
        pieces = self._cut(self.config.unit)
        # The last piece often has no layer. Then it runs only if a step needs the outputs of the whole model. With a
        # weight provider it is always finished: it may have embedding tables and quantizers, which must be stored.
        last_has_work = self.weight_provider is not None or bool(uses.keys() & set(pieces[-1].nodes))
        with phase("tuning", total=len(uses), unit="layers", show=progress) as running:
            for index, piece in enumerate(pieces if last_has_work else pieces[:-1]):
                self._finish_piece(f"{index:04}", piece)
                running.advance(len(uses.keys() & set(piece.nodes)))
        if self.tuner.model_steps:
            if not last_has_work:
                self.tuner.pass_piece(pieces[-1])
            with phase("tuning the whole model", show=progress):
                self._finish_model()

    def _cut(self, unit: Unit) -> list[Piece]:
        return cut_into_pieces(self.walk.graph, self.walk.same_nodes, self.tuner.uses.__contains__, unit)

    def _finish_piece(self, name: str, piece: Piece) -> None:
        """Tune one piece, or load its result from the checkpoint. Either way the walk passes it."""
        modules = self._load_modules(piece)
        stored = self.checkpoint.load_piece(name)
        if stored is None:
            stored = self._store_result(name, modules, self.tuner.tune_piece(piece, modules))
        else:
            restore_states(modules, stored.states)
            self.tuner.pass_piece(piece)
        self._add_result(piece, modules, stored)

    def _finish_model(self) -> None:
        """Run steps over the whole model, whose pieces are finished, or load their result from the checkpoint."""
        (whole_model,) = self._cut("model")
        modules = self._load_modules(whole_model)
        stored = self.checkpoint.load_piece(WHOLE_MODEL)
        if stored is None:
            tuned_names = {row.name for row in self.rows}
            uses = [use for use in self.tuner.uses.values() if self.tuner.name_of(use.node) in tuned_names]
            result = self.tuner.tune_whole_model(whole_model, modules, uses)
            stored = self._store_result(WHOLE_MODEL, modules, result)
        else:
            restore_states(modules, stored.states)
        self._add_result(whole_model, modules, stored)

    def _load_modules(self, piece: Piece) -> dict[str, nn.Module]:
        """Return the modules of a piece that may change, by path, with the weights of a provider loaded."""
        modules = self._changeable_modules(piece)
        if self.weight_provider is not None:
            load_weights(self.walk, piece, self.weight_provider)
            for layer in (layer for node in piece.nodes for layer in self.walk.get_quantized_layers(node)):
                layer.freeze()
        return modules

    def _changeable_modules(self, piece: Piece) -> dict[str, nn.Module]:
        """Return the quantized layers and activation quantizers of a piece, by path.

        Embedding tables are not tuned. With a weight provider they are included, because their codes must be stored.
        """
        modules: dict[str, nn.Module] = {}
        for node in piece.nodes:
            stub = self.walk.get_stub(node)
            if stub is not None:
                modules[str(node.target)] = stub
            for layer in self.walk.get_quantized_layers(node):
                if layer.kind != EMBEDDING or self.weight_provider is not None:
                    modules |= {self.walk.names[id(sharing)]: sharing for sharing in layer.sharing_layers}
        return modules

    def _store_result(self, name: str, modules: Mapping[str, nn.Module], result: PieceResult) -> StoredPiece:
        """Store the result and the states of the modules in the checkpoint. Returns both."""
        if self.weight_provider is not None:
            _choose_nearest(modules)
        states = copy_states(modules)
        self.checkpoint.store_piece(name, states, result)
        return StoredPiece(states, result)

    def _add_result(self, piece: Piece, modules: Mapping[str, nn.Module], stored: StoredPiece) -> None:
        """Set the states in the user's model, or release the weights of a provider; and add the rows of the report."""
        if self.weight_provider is None:
            # The walk works on a copy of the model, so the user's model gets the result here.
            restore_states({path: self.model.get_submodule(path) for path in modules}, stored.states)
        else:
            release_weights(self.walk, piece, self.weight_provider)
        result = stored.result
        self.rows += result.rows
        self.skipped |= result.skipped
        self.pieces += [result.piece] if result.piece is not None else []


def _choose_nearest(modules: Mapping[str, nn.Module]) -> None:
    """Set the nearest codes in layers without codes: they cannot be computed after the weights are released."""
    for layer in modules.values():
        if isinstance(layer, QuantizedLayer) and layer.weight_quant.chosen is None:
            layer.set_codes(layer.get_deployed().codes)
