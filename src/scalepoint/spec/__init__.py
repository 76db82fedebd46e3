"""The tensor layer: a spec describes how one tensor is quantized, and modules simulate it."""

from scalepoint.errors import BlockSizeMismatchError
from scalepoint.numerics import QParams, QuantizationFormulation, QuantizationScheme, ScaleRounding
from scalepoint.spec.components import QuantizationComponentFactory
from scalepoint.spec.default_fake_quantize import DefaultFakeQuantize, fp4_forward
from scalepoint.spec.dynamic import DynamicQParamsCalculator, StatelessQParamsCalculatorBase
from scalepoint.spec.extended import ExtendedQuantizationSpec
from scalepoint.spec.fake_quantize import FakeQuantizeImplBase
from scalepoint.spec.granularity import (
    CompressionTargetTensor,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenBlockGranularity,
    PerTokenGranularity,
    QuantizationGranularity,
    resolve_block_sizes,
)
from scalepoint.spec.histogram import (
    HistogramEntropyQParamsCalculator,
    HistogramMseQParamsCalculator,
    HistogramPercentileQParamsCalculator,
    HistogramQParamsCalculator,
)
from scalepoint.spec.learned import LearnedScaleQParamsCalculator
from scalepoint.spec.pair_safe import PairSafeRangeCalculator
from scalepoint.spec.palette import (
    PaletteFakeQuantize,
    PaletteQParamsCalculator,
    PerGroupedChannelGranularity,
    palette_spec,
)
from scalepoint.spec.qparams_calculator import (
    DefaultQParamsCalculator,
    QParamsCalculatorBase,
    StatefulQParamsCalculatorBase,
    StaticQParamsCalculator,
)
from scalepoint.spec.range_calculator import (
    EntropyRangeCalculator,
    MinMaxRangeCalculator,
    MseRangeCalculator,
    PercentileRangeCalculator,
    RangeCalculatorBase,
)
from scalepoint.spec.running import (
    GlobalMinMaxQParamsCalculator,
    MovingAverageQParamsCalculator,
    RunningRangeMixin,
)
from scalepoint.spec.signed_scale import SignedScaleQParamsCalculator
from scalepoint.spec.sparsity import Sparsity
from scalepoint.spec.spec import (
    QuantizationSpec,
    default_activation_quantization_spec,
    default_weight_quantization_spec,
)

__all__ = [
    "BlockSizeMismatchError",
    "CompressionTargetTensor",
    "DefaultFakeQuantize",
    "DefaultQParamsCalculator",
    "DynamicQParamsCalculator",
    "EntropyRangeCalculator",
    "ExtendedQuantizationSpec",
    "FakeQuantizeImplBase",
    "GlobalMinMaxQParamsCalculator",
    "HistogramEntropyQParamsCalculator",
    "HistogramMseQParamsCalculator",
    "HistogramPercentileQParamsCalculator",
    "HistogramQParamsCalculator",
    "LearnedScaleQParamsCalculator",
    "MinMaxRangeCalculator",
    "MovingAverageQParamsCalculator",
    "MseRangeCalculator",
    "PairSafeRangeCalculator",
    "PaletteFakeQuantize",
    "PaletteQParamsCalculator",
    "PerBlockGranularity",
    "PerChannelGranularity",
    "PerGroupedChannelGranularity",
    "PerTensorGranularity",
    "PerTokenBlockGranularity",
    "PerTokenGranularity",
    "PercentileRangeCalculator",
    "QParams",
    "QParamsCalculatorBase",
    "QuantizationComponentFactory",
    "QuantizationFormulation",
    "QuantizationGranularity",
    "QuantizationScheme",
    "QuantizationSpec",
    "RangeCalculatorBase",
    "RunningRangeMixin",
    "ScaleRounding",
    "SignedScaleQParamsCalculator",
    "Sparsity",
    "StatefulQParamsCalculatorBase",
    "StatelessQParamsCalculatorBase",
    "StaticQParamsCalculator",
    "default_activation_quantization_spec",
    "default_weight_quantization_spec",
    "fp4_forward",
    "palette_spec",
    "resolve_block_sizes",
]
