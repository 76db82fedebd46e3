"""The table of TensorRT's rules on ONNX Q/DQ graphs. They are necessary for a fast engine, but not sufficient."""

from scalepoint.checking import tensorrt_placement, tensorrt_types
from scalepoint.checking.rule import Rule, Severity

_E, _P, _A, _W = Severity.ERROR, Severity.PERFORMANCE, Severity.ACCURACY, Severity.ADVICE

RULES: tuple[Rule, ...] = (
    Rule(
        "R01",
        _E,
        "TensorRT quantizes symmetrically, in int8, fp8 e4m3, int4 or fp4",
        "Quantize symmetrically and give Q and DQ a zero point of zeros in the signed type.",
        tensorrt_types.check_zero_points,
    ),
    Rule(
        "R02",
        _E,
        "the parser needs constant positive scales, one per tensor, per channel or per block",
        "Store the scale as an initializer that fits the data and the axis.",
        tensorrt_types.check_scales,
    ),
    Rule(
        "R03",
        _E,
        "activations are quantized per tensor only",
        "Use one scale for this activation.",
        tensorrt_types.check_activation_granularity,
    ),
    Rule(
        "R04",
        _E,
        "its kernels need one weight scale per output channel",
        "Quantize the weight per output channel.",
        tensorrt_types.check_weight_axis,
    ),
    Rule(
        "R05",
        _E,
        "TensorRT quantizes the bias itself and cannot dequantize int32",
        "Leave the bias in float, without Q/DQ.",
        tensorrt_types.check_bias_is_float,
    ),
    Rule(
        "R06",
        _E,
        "only QuantizeLinear and DequantizeLinear are imported",
        "Export Q/DQ pairs around the float operator instead.",
        tensorrt_types.check_integer_operators,
    ),
    Rule(
        "R07",
        _E,
        "the ONNX schema of this opset does not have it",
        "Export with a later opset.",
        tensorrt_types.check_opsets,
    ),
    Rule(
        "R08",
        _E,
        "in a strongly typed network all types must agree, and DQ fuses only with its direct reader",
        "Give scales the dtype of the float remainder and remove the Cast.",
        tensorrt_types.check_float_dtypes,
    ),
    Rule(
        "R09",
        _P,
        "a half-quantized operation runs as a float kernel and pays for the dequantization too",
        "Put Q/DQ on both operands, or on neither.",
        tensorrt_placement.check_both_operands,
    ),
    Rule(
        "R10",
        _P,
        "it breaks the fusion into one kernel",
        "Move the pair after the whole group, to the input of the next group.",
        tensorrt_placement.check_epilogues,
    ),
    Rule(
        "R11",
        _P,
        "Q moves over the pool and Pad folds into the convolution only if nothing is between them",
        "Put the pair after the pool.",
        tensorrt_placement.check_pools_and_pads,
    ),
    Rule(
        "R12",
        _P,
        "Conv and Add become one int8 kernel only with Q/DQ on the skip input and nowhere else",
        "Put Q/DQ on the skip input and remove it from the convolution's side.",
        tensorrt_placement.check_residuals,
    ),
    Rule(
        "R13",
        _P,
        "a layer without weights that reads int8 must also write int8",
        "Put Q/DQ on its output, or remove it from its inputs.",
        tensorrt_placement.check_int8_in_and_out,
    ),
    Rule(
        "R14",
        _P,
        "with different scales every branch is requantized",
        "Share one scale among the inputs and the output of the Concat.",
        tensorrt_placement.check_concat_scales,
    ),
    Rule(
        "R15",
        _P,
        "pairs are moved and merged only if their scales are equal",
        "Share one pair among all readers of the tensor.",
        tensorrt_placement.check_equal_scales,
    ),
    Rule(
        "R16",
        _P,
        "Q/DQ costs time and gains none there",
        "Leave this product in float.",
        tensorrt_types.check_small_products,
    ),
    Rule(
        "R17",
        _P,
        "Q/DQ costs time and gains none there",
        "Leave this convolution in float.",
        tensorrt_types.check_small_convolutions,
    ),
    Rule(
        "R18",
        _P,
        "there is no fused int8 attention kernel for it",
        "Leave both products and the mask of this attention in float.",
        tensorrt_placement.check_int8_attention,
    ),
    Rule(
        "R19",
        _P,
        "the fused fp8 kernel matches only the complete pattern",
        "Quantize q, k, v, the softmax (scale 1/448) and the result, or none of them.",
        tensorrt_placement.check_fp8_attention,
    ),
    Rule(
        "R20",
        _A,
        "norms, softmax and GELU lose accuracy in int8 and have no kernel for it",
        "Leave it in float: remove this pair.",
        tensorrt_placement.check_float_islands,
    ),
    Rule(
        "R21",
        _P,
        "it breaks the fused SiLU",
        "Put the pair after the Mul.",
        tensorrt_placement.check_silu,
    ),
    Rule(
        "R22",
        _P,
        "TensorRT 11 uses the types of the file, and fp32 is slow",
        "Export with float_dtype fp16 or bf16.",
        tensorrt_types.check_float_remainder,
    ),
    Rule(
        "R23",
        _E,
        "TensorRT supports only one form of each block format",
        "Use int4 weights in blocks of 64 or 128, fp4 with two DequantizeLinear, mxfp8 with TensorRT's own operators.",
        tensorrt_types.check_block_formats,
    ),
    Rule(
        "R24",
        _P,
        "int8 ConvTranspose has no kernel or no fusion for this",
        "Leave it in float, or put the batch norm directly after it.",
        tensorrt_placement.check_transposed_convolutions,
    ),
    Rule(
        "R25", _W, "it adds noise and nodes, but no speed", "Remove this pair.", tensorrt_placement.check_needless_pairs
    ),
    Rule(
        "R26",
        _P,
        "Q fuses into the kernel's weights only if they are a stored constant",
        "Fold the computation (a batch norm, a clip) into the weight before the export.",
        tensorrt_types.check_stored_weights,
    ),
)

# Questions that only a built engine can answer (in the JSON of its inspector), so no rule here checks them
POST_BUILD: dict[str, str] = {
    "R24": "whether Q really fuses after ConvTranspose, or its output stays float, depends on the GPU's kernels",
    "reformats": "how many layout conversions the builder inserts",
    "int8 outputs": "the share of convolutions that write int8",
    "attention": "whether attention became one kernel (_mha in its name), which depends on GPU and version",
    "fp8": "whether the GPU has the fp8, fp4 or mxfp8 kernels at all",
}
