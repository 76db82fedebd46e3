"""The class Target: a declaration of what a compiler fuses, where Q/DQ go, and what the runtime can run.

    Target("mine", patterns=BASE_PATTERNS, activation=spec, weight=spec, accepts=(Accepted(...),), rules=(my_rule,))

A target contains no algorithms and does not run models. Other packages read it.
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
from scalepoint.spec.extended import get_sparsity
from scalepoint.spec.palette import is_palette
from scalepoint.spec.spec import to_dtype

_SHORT_DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
METADATA_KEY = "scalepoint.target"  # in the metadata of an exported file


def parse_float_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """Convert a short or long name to a dtype. None is float32."""
    if dtype is None:
        return torch.float32
    return to_dtype(_SHORT_DTYPE_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype)


@dataclass(frozen=True)
class OperationFacts:
    """Properties of an operation, the argument of cost rules."""

    name: str  # layer name
    kind: str
    pattern: str  # name of the pattern that matched it
    weight_shape: tuple[int, ...] = ()
    groups: int = 1
    is_first: bool = False  # whether it reads the model's input
    activation: QuantizationSpec | None = None  # spec of its inputs; None: float
    weight: QuantizationSpec | None = None  # spec of its weight; None: float
    is_masked: bool = False  # attention: whether a mask is added that depends on the inputs
    tokens: int = 0  # attention: the longer of query and key; 0 if the length is dynamic

    @property
    def is_weight_only(self) -> bool:
        return bool(self.weight_shape) and self.activation is None

    @property
    def is_depthwise(self) -> bool:
        return self.kind == "conv" and self.groups > 1 and len(self.weight_shape) > 1 and self.weight_shape[1] == 1

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight_shape[2:]


CostRule = Callable[[OperationFacts], str | None]  # returns a reason if the rule applies, otherwise None


@dataclass(frozen=True)
class Accepted:
    """One family of tensors that the target can run. An empty tuple in a field allows everything."""

    role: str  # "weight" or "activation"
    dtypes: tuple[CodeType, ...]
    schemes: tuple[QuantizationScheme, ...] = ()
    granularities: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()  # of operations
    formulations: tuple[QuantizationFormulation, ...] = (QuantizationFormulation.ZP,)
    scale_dtypes: tuple[torch.dtype | None, ...] = ()  # None: the dtype of the float tensors
    dynamic: bool = True  # whether scales may be computed in every call; False: they are constants of the file
    pruned_palettes: bool = False  # whether pruned weights may have palettes

    @property
    def is_for_palettes(self) -> bool:
        """Whether the row lists palettes."""
        return "per_grouped_channel" in self.granularities

    def distance(self, dtype: CodeType) -> tuple[bool, bool, int]:
        """Return a sort key for how much a dtype differs from those of this row: listed, float or integer, width."""
        dtype_format, row_format = get_format(dtype), get_format(self.dtypes[0])
        return (
            dtype not in self.dtypes,
            dtype_format.is_float != row_format.is_float,
            abs(dtype_format.bits - row_format.bits),
        )

    def explain_mismatch(self, spec: QuantizationSpec, kind: str) -> str | None:
        """Return what this row does not accept in a spec; None if it accepts the spec."""
        granularity = spec.granularity
        key = QuantizationGranularity.key_of(type(granularity))
        if spec.dtype not in self.dtypes:
            return f"dtype {dtype_name(spec.dtype)}"
        if self.kinds and kind not in self.kinds:
            return f"{dtype_name(spec.dtype)} for {kind}"
        for field_name, value, allowed in (
            ("scheme", spec.qscheme, self.schemes),
            ("formulation", spec.qformulation, self.formulations),
            ("granularity", key, self.granularities),
        ):
            if allowed and value not in allowed:
                return f"{dtype_name(spec.dtype)} with {field_name} {value}"
        return self._explain_parameter_mismatch(spec)

    def _explain_parameter_mismatch(self, spec: QuantizationSpec) -> str | None:
        block_size = getattr(spec.granularity, "block_size", None)
        if self.block_sizes and block_size is not None and block_size not in self.block_sizes:
            return f"{dtype_name(spec.dtype)} in blocks of {block_size}"
        if self.scale_dtypes and spec.scale_dtype not in self.scale_dtypes:
            scale = "float" if spec.scale_dtype is None else dtype_name(spec.scale_dtype)
            return f"{dtype_name(spec.dtype)} with {scale} scales"
        if is_palette(spec) and get_sparsity(spec) is not None and not self.pruned_palettes:
            return f"{dtype_name(spec.dtype)} palettes of pruned weights (sparsity)"
        if not self.dynamic and issubclass(spec.qparam_calculator_cls, DynamicQParamsCalculator):
            return f"{dtype_name(spec.dtype)} with scales that are computed in every call (dynamic)"
        return None

    def __str__(self) -> str:
        words = ["/".join(map(dtype_name, self.dtypes)), "/".join(scheme.value for scheme in self.schemes)]
        blocks = f" of {'/'.join(map(str, self.block_sizes))}" if self.block_sizes else ""
        words.append("/".join(self.granularities) + blocks)
        if self.formulations != (QuantizationFormulation.ZP,):
            formulations = "/".join(formulation.value for formulation in self.formulations)
            words.append(f"formulation {formulations or 'any'}")
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class RewriteRule:
    """A rewrite that the file format applies for this target, by name, and why the target needs it."""

    name: str
    why: str


@dataclass(frozen=True)
class Target:
    """One deployment target.

    Attributes:
        name: Name of the target, as in `deploy(target=...)`.
        summary: One line for lists of targets.
        patterns: Groups of operations that the compiler fuses, with their Q/DQ points.
        activation: Default spec of activations.
        weight: Default spec of weights.
        accepts: Families of tensors that it can run; empty: everything.
        activations: Activation spec by pattern name, where it differs from `activation`.
        rules: If one of these applies, the operation stays float, and the report gives the reason.
        refuses: If one of these applies, TargetError is raised with the reason: the target has no kernel for the
            operation, or none for the precision that the config asks for.
        same_scale_kinds: Kinds whose output has the scale of their input, such as reshapes.
        concat_kinds: Kinds whose inputs get the scale of the output if nothing else reads them.
        folds_input_scaling: Whether a quantizer can absorb a factor per channel, so that the factor costs no time.
        conversions: Rewrites of the graph before patterns are matched.
        adapt_weight: Changes the spec of a weight by properties of its operation.
        float_if_readers_are_float: Whether operations without weights stay float if all their readers are float.
        table: Spec of embedding tables, one scale per row; None: they stay float.
        head: Spec of the last layer of a language model; None: it stays float.
        caches: Specs of the KV cache of a language runtime, by name.
        bias: "int32" stores biases with the scale input x weight; "float" leaves them float.
        float_dtypes: Dtypes in which unquantized tensors may be stored; the first is the default.
        block_scale_dtypes: Scales of blocks are rounded to values of all these dtypes, also in the simulation.
        has_half_scales: Whether files store scales as float16. The simulation then rounds them too.
        has_signed_scales: Whether the scale of a block may be negative.
        sparse_code_bits: Widths of the codes of pruned weights that files store without their zeros, with a mask.
        is_language: Whether it is a target of `deploy_checkpoint`.
        domains: Operator domains of the compiler in addition to that of ONNX.
        rewrites: Rewrites of operations in its files.
        dequantizes_weights_on_load: Whether weights of float layers may be stored in int8 and dequantized at load time.
        format: Key of the file format in scalepoint.formats.
        runtime: Key of the runtime in scalepoint.runtimes that runs its files; None: files are not run.
        kernel_tables: Names of its tables of measured kernels, one for each CPU; used to leave slow int8 layers float.
        is_placed_by_speed: Whether deploy measures layers in the runtime, and leaves slow ones float.
        fixed_shapes_reason: Why only the batch of its files can be a free axis; "" if other axes can be free too.
        options: Options that the target was built with, for the report and the file.
    """

    name: str
    summary: str
    patterns: tuple[Pattern, ...]
    activation: QuantizationSpec
    weight: QuantizationSpec
    accepts: tuple[Accepted, ...] = ()
    activations: Mapping[str, QuantizationSpec] = field(default_factory=dict, hash=False)
    rules: tuple[CostRule, ...] = ()
    refuses: tuple[CostRule, ...] = ()
    same_scale_kinds: frozenset[str] = frozenset()
    concat_kinds: frozenset[str] = frozenset()
    folds_input_scaling: bool = False
    conversions: tuple[Conversion, ...] = CONVERSIONS
    adapt_weight: Callable[[QuantizationSpec, OperationFacts], QuantizationSpec] | None = None
    float_if_readers_are_float: bool = False
    table: QuantizationSpec | None = None
    head: QuantizationSpec | None = None
    caches: Mapping[str, QuantizationSpec] = field(default_factory=dict, hash=False)
    bias: Literal["float", "int32"] = "float"
    float_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    block_scale_dtypes: tuple[torch.dtype, ...] = ()
    has_half_scales: bool = False
    has_signed_scales: bool = False
    sparse_code_bits: tuple[int, ...] = ()
    is_language: bool = False
    domains: tuple[str, ...] = ()
    rewrites: tuple[RewriteRule, ...] = ()
    dequantizes_weights_on_load: bool = False
    format: str = "onnx"
    runtime: str | None = None
    kernel_tables: tuple[str, ...] = ()
    is_placed_by_speed: bool = False
    fixed_shapes_reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise SpecError(f"the name of a target must be a text, got {short_repr(self.name)}")
        if not (isinstance(self.format, str) and self.format):
            raise SpecError(
                f"target {self.name!r}: format= must be the key of a file format, got {short_repr(self.format)}"
            )
        if not (self.runtime is None or (isinstance(self.runtime, str) and self.runtime)):
            raise SpecError(
                f"target {self.name!r}: runtime= must be the key of a runtime, got {short_repr(self.runtime)}"
            )
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
    def file_metadata(self) -> dict[str, str]:
        """The metadata of exported files: the target and its options."""
        return {
            METADATA_KEY: self.name,
            **{f"{METADATA_KEY}.{name}": str(self.options[name]) for name in sorted(self.options)},
        }

    def why_float(self, facts: OperationFacts) -> str | None:
        """Return the reason of the first cost rule that leaves an operation float; None if no rule does."""
        return next((reason for rule in self.rules if (reason := rule(facts))), None)

    def check_operation(self, facts: OperationFacts) -> None:
        """Raise TargetError if a rule of `refuses` applies to an operation."""
        reason = next((reason for rule in self.refuses if (reason := rule(facts))), None)
        if reason:
            raise TargetError(f"{facts.name}: target {self.name!r} cannot run {reason}")

    def activation_for(self, pattern: str) -> QuantizationSpec:
        """Return the default spec at the Q/DQ points of a pattern."""
        return self.activations.get(pattern, self.activation)

    def weight_for(self, spec: QuantizationSpec, facts: OperationFacts) -> QuantizationSpec:
        """Return the spec of a weight as adapted to the kernels of this target."""
        return spec if self.adapt_weight is None else self.adapt_weight(spec, facts)

    def check_float_dtype(self, dtype: str | torch.dtype | None) -> torch.dtype:
        """Return the dtype of unquantized tensors, by default the first of `float_dtypes`.

        Raises:
            TargetError: The target cannot run this dtype.
        """
        parsed = self.float_dtypes[0] if dtype is None else parse_float_dtype(dtype)
        if parsed not in self.float_dtypes:
            allowed = " or ".join(map(dtype_name, self.float_dtypes))
            raise TargetError(
                f"float_dtype={dtype_name(parsed)}: target {self.name!r} runs unquantized tensors only in {allowed}"
            )
        return parsed

    def check_free_sizes(self, dynamic_axes: object) -> None:
        """Raise TargetError if `dynamic_axes` is used and the files have fixed sizes."""
        if dynamic_axes and self.fixed_shapes_reason:
            raise TargetError(
                f"dynamic_axes= cannot be used with target {self.name!r}, whose files have fixed sizes: "
                f"{self.fixed_shapes_reason}. Omit it, and deploy once for each size with an example of that size"
            )

    def check_formulation(self, spec: QuantizationSpec, role: str, where: str) -> None:
        """Raise TargetError if no tensor of this role can have the formulation of the spec."""
        rows = [row for row in self.accepts if row.role == role]
        if not rows or any(not row.formulations or spec.qformulation in row.formulations for row in rows):
            return
        formulation = spec.qformulation.value
        raise TargetError(
            f"{where}: target {self.name!r} cannot run qformulation={formulation!r}: its kernels and files use integer "
            "zero points. Use qformulation='zp'"
        )

    def check(self, spec: QuantizationSpec, role: str, kind: str, where: str) -> None:
        """Check that the target can run a spec.

        Args:
            spec: The spec of a weight or activation.
            role: "weight" or "activation".
            kind: Kind of the operation; "" accepts the spec if any kind can have it.
            where: Name of the layer, for the error.

        Raises:
            TargetError: No row of `accepts` has the spec. The message names the nearest one that can run.
        """
        if not self.accepts:
            return
        rows = sorted(
            (row for row in self.accepts if row.role == role),
            key=lambda row: (row.is_for_palettes != is_palette(spec), *row.distance(spec.dtype)),
        )
        mismatches = [row.explain_mismatch(spec, kind or next(iter(row.kinds), "")) for row in rows]
        if None in mismatches:
            return
        mismatch = mismatches[0] if mismatches else f"any {role}"
        nearest = next((row for row in rows if not kind or not row.kinds or kind in row.kinds), None)
        if nearest is not None and spec.dtype in nearest.dtypes:  # the dtype fits, so its row says what does not
            mismatch = mismatches[rows.index(nearest)]
        if nearest is None:
            advice = "leave it float"
        else:
            needs_constant_scales = not nearest.dynamic and "dynamic" in str(mismatch)
            advice = f"nearest supported: {nearest}{', with constant scales' if needs_constant_scales else ''}"
        raise TargetError(f"{where}: target {self.name!r} cannot run {mismatch} as {role} ({advice})")
