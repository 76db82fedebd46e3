"""Child program of `scalepoint.support.cpu`: computes one product in a library, which may kill this process."""

import sys
from collections.abc import Callable


def multiply_in_torch() -> None:
    import torch  # noqa: PLC0415

    x = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.mm(x, x)


def multiply_in_openvino() -> None:
    import numpy as np  # noqa: PLC0415
    import openvino  # noqa: PLC0415
    from openvino import opset13 as operations  # noqa: PLC0415

    x = operations.parameter([64, 64], np.float32)
    product = operations.matmul(x, operations.constant(np.ones((64, 64), np.float32)), False, False)
    compiled = openvino.Core().compile_model(openvino.Model([product], [x]), "CPU", {"INFERENCE_NUM_THREADS": 1})
    compiled(np.ones((64, 64), np.float32))


PRODUCTS: dict[str, Callable[[], None]] = {"torch": multiply_in_torch, "openvino": multiply_in_openvino}


if __name__ == "__main__":
    PRODUCTS[sys.argv[1]]()
