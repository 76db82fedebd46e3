"""Runs in an environment of its own, where another tool is installed; knows nothing of scalepoint.

python peer.py HOW NETWORK DATA OUTPUT          DATA: safetensors of `calibration` and `test`; OUTPUT: the outputs, and
                                                `seconds` of the CPU that quantizing took
"""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "demo"))


def brevitas(model: nn.Module, batches: list[Tensor], way: str) -> nn.Module:
    """As its own example of classification does: GPTQ or Qronos with activation order, then its bias correction."""
    from brevitas.graph.quantize import preprocess_for_quantize  # noqa: PLC0415
    from brevitas_examples.imagenet_classification.ptq import ptq_common as ptq  # noqa: PLC0415

    loader = [(images, images) for images in batches]
    is_imagenet = model(batches[0][:1]).shape[-1] == 1000
    prepared = preprocess_for_quantize(model, equalize_iters=0, merge_bn=True)
    made: nn.Module = ptq.quantize_model(
        prepared,
        backend="layerwise" if is_imagenet else "fx",  # the first keeps 8 bits at both ends, the second nowhere
        weight_bit_width=4,
        act_bit_width=8,
        bias_bit_width=None,
        weight_quant_granularity="per_channel",
        weight_param_method="mse",
        act_quant_percentile=99.999,
        act_quant_type="asym",
        scale_factor_type="float_scale",
        quant_format="int",
    )
    with torch.no_grad():
        made.eval()(batches[0])  # its weight quantizers are made at the first use
    ptq.calibrate(loader, made)
    if way == "qronos":
        ptq.apply_qronos(made, loader, act_order=True)
    else:
        ptq.apply_gptq(loader, made, act_order=True, use_quant_activations=True)
    ptq.apply_bias_correction(loader, made)
    return made.eval()


def nncf(model: nn.Module, batches: list[Tensor], _: str) -> nn.Module:
    """Post-training quantization with its bias correction; for torch it has the fast one alone."""
    import nncf as tool  # noqa: PLC0415
    from nncf.quantization.advanced_parameters import (  # noqa: PLC0415
        AdvancedQuantizationParameters,
        QuantizationParameters,
    )

    narrow = AdvancedQuantizationParameters(weights_quantization_params=QuantizationParameters(num_bits=4))
    if model(batches[0][:1]).shape[-1] == 1000:
        raise SystemExit("nncf keeps one width for all layers")
    made: nn.Module = tool.quantize(
        model,
        tool.Dataset(batches),
        preset=tool.QuantizationPreset.MIXED,
        target_device=tool.TargetDevice.NPU,  # the others refuse 4 bits
        subset_size=len(batches),
        fast_bias_correction=True,
        advanced_parameters=narrow,
    )
    return made.eval()


TOOLS: dict[str, Callable[[nn.Module, list[Tensor], str], nn.Module]] = {"brevitas": brevitas, "nncf": nncf}


def main() -> None:
    how, network, data, output = sys.argv[1:]
    tool, _, way = how.partition(":")
    torch.set_num_threads(1)
    given = load_file(data)
    model = importlib.import_module(network).trained().eval()
    batches = list(given["calibration"].split(32))
    start = time.process_time()
    made = TOOLS[tool](model, batches, way)
    seconds = time.process_time() - start
    with torch.no_grad():
        outputs = torch.cat([made(images) for images in given["test"].split(64)])
    save_file({"outputs": outputs.contiguous(), "seconds": torch.tensor(seconds)}, output)


if __name__ == "__main__":
    main()
