"""A small net with with_random_statistics batch norms, and data for it."""

import pytest
import torch

from tests.formats.onnx.test_export import Net, with_random_statistics


@pytest.fixture(scope="package")
def model():
    torch.manual_seed(0)
    return with_random_statistics(Net()).eval()


@pytest.fixture(scope="package")
def data():
    torch.manual_seed(1)
    return [torch.randn(8, 3, 32, 32) for _ in range(2)]


@pytest.fixture
def fidelity(model, data):
    """Minus the noise to signal against the float model, in percent."""

    def evaluate(run):
        expected, actual = model(data[0]), run(data[0])
        return float(-100 * (expected - actual).square().sum() / expected.square().sum())

    return evaluate
