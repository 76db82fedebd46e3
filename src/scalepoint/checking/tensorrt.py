"""The table of TensorRT's rules on ONNX Q/DQ graphs. They are necessary for a fast engine, but not sufficient."""

from scalepoint.checking import (
    tensorrt_attention,
    tensorrt_fusions,
    tensorrt_placement,
    tensorrt_types,
    tensorrt_weights,
)
from scalepoint.checking.rule import Rule, Severity

RULES: tuple[Rule, ...] = (
    Rule(
        "R01",
        Severity.ERROR,
        why="TensorRT quantizes symmetrically, in int8, fp8 e4m3, int4 or fp4",
        way_out="Quantize symmetrically and give Q and DQ a zero point of zeros in the signed type.",
        check=tensorrt_types.check_zero_points,
    ),
    Rule(
        "R02",
        Severity.ERROR,
        why="the parser needs constant positive scales, one per tensor, per channel or per block",
        way_out="Store the scale as an initializer that fits the data and the axis.",
        check=tensorrt_types.check_scales,
    ),
    Rule(
        "R03",
        Severity.ERROR,
        why="activations are quantized per tensor only",
        way_out="Use one scale for this activation.",
        check=tensorrt_types.check_activation_granularity,
    ),
    Rule(
        "R04",
        Severity.ERROR,
        why="its kernels need one weight scale per output channel",
        way_out="Quantize the weight per output channel.",
        check=tensorrt_weights.check_weight_axis,
    ),
    Rule(
        "R05",
        Severity.ERROR,
        why="TensorRT quantizes the bias itself and cannot dequantize int32",
        way_out="Leave the bias in float, without Q/DQ.",
        check=tensorrt_types.check_bias_is_float,
    ),
    Rule(
        "R06",
        Severity.ERROR,
        why="only QuantizeLinear and DequantizeLinear are imported",
        way_out="Export Q/DQ pairs around the float operator instead.",
        check=tensorrt_types.check_integer_operators,
    ),
    Rule(
        "R07",
        Severity.ERROR,
        why="the ONNX schema of this opset does not have it",
        way_out="Export with a later opset.",
        check=tensorrt_types.check_opsets,
    ),
    Rule(
        "R08",
        Severity.ERROR,
        why="in a strongly typed network all types must agree, and DQ fuses only with its direct reader",
        way_out="Give scales the dtype of the float remainder and remove the Cast.",
        check=tensorrt_types.check_float_dtypes,
    ),
    Rule(
        "R09",
        Severity.PERFORMANCE,
        why="a half-quantized operation runs as a float kernel and pays for the dequantization too",
        way_out="Put Q/DQ on both operands, or on neither.",
        check=tensorrt_placement.check_both_operands,
    ),
    Rule(
        "R10",
        Severity.PERFORMANCE,
        why="it breaks the fusion into one kernel",
        way_out="Move the pair after the whole group, to the input of the next group.",
        check=tensorrt_fusions.check_epilogues,
    ),
    Rule(
        "R11",
        Severity.PERFORMANCE,
        why="Q moves over the pool and Pad folds into the convolution only if nothing is between them",
        way_out="Put the pair after the pool.",
        check=tensorrt_fusions.check_pools_and_pads,
    ),
    Rule(
        "R12",
        Severity.PERFORMANCE,
        why="Conv and Add become one int8 kernel only with Q/DQ on the skip input and nowhere else",
        way_out="Put Q/DQ on the skip input and remove it from the convolution's side.",
        check=tensorrt_fusions.check_residuals,
    ),
    Rule(
        "R13",
        Severity.PERFORMANCE,
        why="a layer without weights that reads int8 must also write int8",
        way_out="Put Q/DQ on its output, or remove it from its inputs.",
        check=tensorrt_placement.check_int8_in_and_out,
    ),
    Rule(
        "R14",
        Severity.PERFORMANCE,
        why="with different scales every branch is requantized",
        way_out="Share one scale among the inputs and the output of the Concat.",
        check=tensorrt_placement.check_concat_scales,
    ),
    Rule(
        "R15",
        Severity.PERFORMANCE,
        why="pairs are moved and merged only if their scales are equal",
        way_out="Share one pair among all readers of the tensor.",
        check=tensorrt_placement.check_equal_scales,
    ),
    Rule(
        "R16",
        Severity.PERFORMANCE,
        why="Q/DQ costs time and gains none there",
        way_out="Leave this product in float.",
        check=tensorrt_weights.check_small_products,
    ),
    Rule(
        "R17",
        Severity.PERFORMANCE,
        why="Q/DQ costs time and gains none there",
        way_out="Leave this convolution in float.",
        check=tensorrt_weights.check_small_convolutions,
    ),
    Rule(
        "R18",
        Severity.PERFORMANCE,
        why="there is no fused int8 attention kernel for it",
        way_out="Leave both products and the mask of this attention in float.",
        check=tensorrt_attention.check_int8_attention,
    ),
    Rule(
        "R19",
        Severity.PERFORMANCE,
        why="the fused fp8 kernel matches only the complete pattern",
        way_out="Quantize q, k, v, the softmax (scale 1/448) and the result, or none of them.",
        check=tensorrt_attention.check_fp8_attention,
    ),
    Rule(
        "R20",
        Severity.ACCURACY,
        why="norms, softmax and GELU lose accuracy in int8 and have no kernel for it",
        way_out="Leave it in float: remove this pair.",
        check=tensorrt_fusions.check_float_islands,
    ),
    Rule(
        "R21",
        Severity.PERFORMANCE,
        why="it breaks the fused SiLU",
        way_out="Put the pair after the Mul.",
        check=tensorrt_fusions.check_silu,
    ),
    Rule(
        "R22",
        Severity.PERFORMANCE,
        why="TensorRT 11 uses the types of the file, and fp32 is slow",
        way_out="Export with float_dtype fp16 or bf16.",
        check=tensorrt_types.check_float_remainder,
    ),
    Rule(
        "R23",
        Severity.ERROR,
        why="TensorRT supports only one form of each block format",
        way_out=(
            "Use int4 weights in blocks of 64 or 128, fp4 with two DequantizeLinear, mxfp8 with TensorRT's own "
            "operators."
        ),
        check=tensorrt_weights.check_block_formats,
    ),
    Rule(
        "R24",
        Severity.PERFORMANCE,
        why="int8 ConvTranspose has no kernel or no fusion for this",
        way_out="Leave it in float, or put the batch norm directly after it.",
        check=tensorrt_fusions.check_transposed_convolutions,
    ),
    Rule(
        "R25",
        Severity.ADVICE,
        why="it adds noise and nodes, but no speed",
        way_out="Remove this pair.",
        check=tensorrt_placement.check_needless_pairs,
    ),
    Rule(
        "R26",
        Severity.PERFORMANCE,
        why="Q fuses into the kernel's weights only if they are a stored constant",
        way_out="Fold the computation (a batch norm, a clip) into the weight before the export.",
        check=tensorrt_weights.check_stored_weights,
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
