"""A target as a declaration: what its compiler fuses, where it wants Q/DQ, what it can run, what does not pay.

    Target("mine", patterns=BASE_PATTERNS, activation=spec, weight=spec, accepts=(Accepted(...),), rules=(my_rule,))

A target never sees an algorithm, and nothing here runs a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from scalepoint.errors import SpecError, TargetError, short_repr
from scalepoint.numerics import CodeType, dtype_name, get_format
from scalepoint.patterns import Pattern
from scalepoint.patterns.conversions import CONVERSIONS, Conversion
from scalepoint.spec import QuantizationFormulation, QuantizationGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.spec.dynamic import DynamicQParamsCalculator
from scalepoint.spec.spec import to_dtype

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
LABEL = "scalepoint.target"  # in the metadata of an exported file


def parse_float_dtype(given: str | torch.dtype | None) -> torch.dtype:
    """A type by its name, short or long; float32 unless given."""
    return torch.float32 if given is None else to_dtype(_SHORT.get(given, given) if isinstance(given, str) else given)


@dataclass(frozen=True)
class OperationFacts:
    """What a cost rule can see of an operation."""

    name: str
    kind: str
    pattern: str
    weight_shape: tuple[int, ...] = ()
    groups: int = 1
    is_first: bool = False
    activation: QuantizationSpec | None = None  # what its inputs are asked in
    weight: QuantizationSpec | None = None  # what its weight is asked in
    is_masked: bool = False  # attention: whether a mask is added that depends on the inputs
    tokens: int = 0  # attention: the longer of query and key, 0 when it is free

    @property
    def is_weight_only(self) -> bool:
        return bool(self.weight_shape) and self.activation is None

    @property
    def is_depthwise(self) -> bool:
        return self.kind == "conv" and self.groups > 1 and len(self.weight_shape) > 1 and self.weight_shape[1] == 1

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight_shape[2:]


CostRule = Callable[[OperationFacts], str | None]  # why the operation is better left float, or None


@dataclass(frozen=True)
class Accepted:
    """One family of tensors that the target can run. An empty tuple allows everything."""

    role: str  # weight or activation
    dtypes: tuple[CodeType, ...]
    schemes: tuple[QuantizationScheme, ...] = ()
    granularities: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    formulations: tuple[QuantizationFormulation, ...] = (QuantizationFormulation.ZP,)
    dynamic: bool = True  # whether its parameters may be made for every call; False: they are constants of the file

    def distance(self, dtype: CodeType) -> tuple[bool, bool, int]:
        """How unlike a dtype the row's own are: another one, of another kind, of another width."""
        asked_format, accepted_format = get_format(dtype), get_format(self.dtypes[0])
        return (
            dtype not in self.dtypes,
            asked_format.is_float != accepted_format.is_float,
            abs(asked_format.bits - accepted_format.bits),
        )

    def complaint(self, spec: QuantizationSpec, kind: str) -> str | None:
        """What about the spec does not fit, or None."""
        granularity = spec.granularity
        key = QuantizationGranularity.key_of(type(granularity))
        if spec.dtype not in self.dtypes:
            return f"dtype {dtype_name(spec.dtype)}"
        if self.kinds and kind not in self.kinds:
            return f"{dtype_name(spec.dtype)} for {kind}"
        for said, value, allowed in (
            ("scheme", spec.qscheme, self.schemes),
            ("formulation", spec.qformulation, self.formulations),
            ("granularity", key, self.granularities),
        ):
            if allowed and value not in allowed:
                return f"{dtype_name(spec.dtype)} with {said} {value}"
        return self._parameter_complaint(spec)

    def _parameter_complaint(self, spec: QuantizationSpec) -> str | None:
        blocks = getattr(spec.granularity, "block_size", None)
        if self.block_sizes and blocks is not None and blocks not in self.block_sizes:
            return f"{dtype_name(spec.dtype)} in blocks of {blocks}"
        if not self.dynamic and issubclass(spec.qparam_calculator_cls, DynamicQParamsCalculator):
            return f"{dtype_name(spec.dtype)} with scales that are made for every call (dynamic)"
        return None

    def __str__(self) -> str:
        words = ["/".join(map(dtype_name, self.dtypes)), "/".join(scheme.value for scheme in self.schemes)]
        blocks = f" of {'/'.join(map(str, self.block_sizes))}" if self.block_sizes else ""
        words.append("/".join(self.granularities) + blocks)
        if self.formulations != (QuantizationFormulation.ZP,):
            words.append(f"formulation {'/'.join(each.value for each in self.formulations) or 'any'}")
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class RewriteRule:
    """A rule of the file's format that writes an operation in other words, and why this target wants it."""

    name: str
    why: str


@dataclass(frozen=True)
class Target:
    """One deployment target: its patterns, the precisions it runs, where quantizers go, and how files are written."""

    name: str
    summary: str
    patterns: tuple[Pattern, ...]
    activation: QuantizationSpec
    weight: QuantizationSpec
    accepts: tuple[Accepted, ...] = ()  # nothing: everything
    activations: Mapping[str, QuantizationSpec] = field(
        default_factory=dict, hash=False
    )  # of patterns that have others
    rules: tuple[CostRule, ...] = ()
    refuses: tuple[CostRule, ...] = ()  # what it cannot run in any precision
    same_scale_kinds: frozenset[str] = frozenset()  # kinds whose output has the parameters of their input
    concat_kinds: frozenset[str] = (
        frozenset()
    )  # kinds whose output's parameters their inputs have too, if nothing else reads
    folds_input_scaling: bool = (
        False  # whether a factor a channel before a quantizer is free: the quantizer takes it in
    )
    conversions: tuple[Conversion, ...] = CONVERSIONS
    adapt_weight: Callable[[QuantizationSpec, OperationFacts], QuantizationSpec] | None = None
    float_if_readers_are_float: bool = False  # whether what has no weights stays float when all that read it do
    table: QuantizationSpec | None = None  # of embeddings, a scale a row; None: they stay float
    head: QuantizationSpec | None = None  # of the last layer of a language model; None: it stays float
    caches: Mapping[str, QuantizationSpec] = field(
        default_factory=dict, hash=False
    )  # how a language runtime can keep keys and values, by name
    bias: Literal["float", "int32"] = "float"
    float_dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # in which what is not quantized may be stored
    block_scale_dtypes: tuple[torch.dtype, ...] = ()  # all of which hold scales of blocks, as the simulation's are
    has_half_scales: bool = False  # whether files hold scales in float16, so that the simulation has such ones
    has_signed_scales: bool = False  # whether a scale of its blocks may be negative
    is_language: bool = False  # made from a language model's checkpoint, by deploy_checkpoint
    domains: tuple[str, ...] = ()  # of operators that its compiler has beyond ONNX's own
    rewrites: tuple[RewriteRule, ...] = ()  # operations that its files write in other words
    dequantizes_weights_on_load: bool = (
        False  # whether a weight of a float product may be stored in int8: made float as a file is loaded
    )
    format: str = "onnx"  # of its files: a key of scalepoint.formats
    runtime: str | None = None  # where its files are run and judged: a key of scalepoint.runtimes
    kernel_tables: tuple[str, ...] = ()  # its tables of measured kernels, one a CPU: they tell where int8 pays
    fixed_shapes_reason: str = ""  # why its files have no free axes beside the batch; nothing where they have
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # what it was made with, for the report

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise SpecError(f"a target has a name, not {short_repr(self.name)}")
        if not (isinstance(self.format, str) and self.format):
            raise SpecError(f"target {self.name!r}: format= is the key of a file format, not {short_repr(self.format)}")
        if not (self.runtime is None or (isinstance(self.runtime, str) and self.runtime)):
            raise SpecError(f"target {self.name!r}: runtime= is the key of a runtime, not {short_repr(self.runtime)}")
        for spec, role in ((self.activation, "activation"), (self.weight, "weight")):
            self.check(spec, role, "", self.name)
        for spec in self.activations.values():
            self.check(spec, "activation", "", self.name)
        if self.table is not None:
            self.check(self.table, "weight", "embedding", self.name)

    @property
    def pattern_names(self) -> tuple[str, ...]:
        return tuple(pattern.name for pattern in self.patterns)

    @property
    def labels(self) -> dict[str, str]:
        """What an exported file says that it was made for."""
        return {LABEL: self.name, **{f"{LABEL}.{name}": str(self.options[name]) for name in sorted(self.options)}}

    def why_float(self, facts: OperationFacts) -> str | None:
        """The first rule that says that an operation is better left float."""
        return next((reason for rule in self.rules if (reason := rule(facts))), None)

    def refuse(self, facts: OperationFacts) -> None:
        """Raise TargetError for an operation that cannot be here in any precision."""
        why = next((reason for rule in self.refuses if (reason := rule(facts))), None)
        if why:
            raise TargetError(f"{facts.name}: target {self.name!r} cannot run {why}")

    def activation_for(self, pattern: str) -> QuantizationSpec:
        """Of the tensors at the points of a pattern."""
        return self.activations.get(pattern, self.activation)

    def weight_for(self, spec: QuantizationSpec, facts: OperationFacts) -> QuantizationSpec:
        """The weight's spec as this target's kernels want it."""
        return spec if self.adapt_weight is None else self.adapt_weight(spec, facts)

    def check_float_dtype(self, given: str | torch.dtype | None) -> torch.dtype:
        """The type of what is not quantized, the target's first unless given; TargetError for what cannot run here."""
        dtype = self.float_dtypes[0] if given is None else parse_float_dtype(given)
        if dtype not in self.float_dtypes:
            allowed = " or ".join(map(dtype_name, self.float_dtypes))
            raise TargetError(
                f"float_dtype={dtype_name(dtype)}: target {self.name!r} runs what is not quantized in {allowed}"
            )
        return dtype

    def check_free_sizes(self, dynamic_axes: object) -> None:
        """Raise TargetError where axes are asked for that its files cannot have free."""
        if dynamic_axes and self.fixed_shapes_reason:
            raise TargetError(
                f"dynamic_axes: target {self.name!r} has files of fixed sizes: {self.fixed_shapes_reason}. Omit it and "
                "deploy once for each size, with an example of it"
            )

    def check_formulation(self, spec: QuantizationSpec, role: str, where: str) -> None:
        """Raise TargetError where no tensor of this role can have the spec's formulation."""
        rows = [row for row in self.accepts if row.role == role]
        if not rows or any(not row.formulations or spec.qformulation in row.formulations for row in rows):
            return
        formulation = spec.qformulation.value
        raise TargetError(
            f"{where}: target {self.name!r} cannot run qformulation={formulation!r}: its kernels and files have "
            "integer zero points. Use qformulation='zp'"
        )

    def check(self, spec: QuantizationSpec, role: str, kind: str, where: str) -> None:
        """Raise TargetError for what cannot run here, with the nearest choice that can."""
        if not self.accepts:
            return
        rows = [row for row in self.accepts if row.role == role]
        complaints = [
            (row, row.complaint(spec, kind) if kind else row.complaint(spec, row.kinds[0] if row.kinds else ""))
            for row in rows
        ]
        if any(complaint is None for _, complaint in complaints):
            return
        nearest_first = sorted(complaints, key=lambda pair: pair[0].distance(spec.dtype))
        complaint = nearest_first[0][1] if complaints else f"any {role}"
        row = next((row for row, _ in nearest_first if not (kind and row.kinds) or kind in row.kinds), None)
        constant = ", with constant scales" if row and not row.dynamic and "dynamic" in str(complaint) else ""
        way = f"the nearest it can: {row}{constant}" if row else "leave it float"
        raise TargetError(f"{where}: target {self.name!r} cannot run {complaint} as {role} ({way})")
