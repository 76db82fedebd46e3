"""The passes that are skipped when a program is lowered do not change the file."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from scalepoint.compat import executorch as passes
from scalepoint.formats.executorch.write import executorch_imported
from scalepoint.formats.export import export
from scalepoint.quantize.quantize_model import quantize
from scalepoint.runtimes import find_runtime

IS_INSTALLED = find_runtime("executorch").is_installed
pytestmark = pytest.mark.skipif(
    not IS_INSTALLED, reason="executorch is not installed: pip install 'scalepoint[executorch]'"
)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """ExecuTorch warns when it is imported."""
    with executorch_imported():
        from scalepoint.compat import executorch_partitioner  # noqa: F401


class Net(nn.Module):
    def __init__(self, layer: nn.Module, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.after = layer, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(x))


class Residual(nn.Module):
    """Like a ResNet: a stem with a pool, a sum, a mean and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.conv, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x + self.conv(x)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        return x + F.gelu(self.out(F.scaled_dot_product_attention(query, key, value)))


class Computed(nn.Module):
    """A recurrent cell whose weights are computed: it decomposes to linear layers that XNNPACK rejects."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight(x).reshape(24, 8)
        return torch.gru_cell(x[:, :8], torch.tanh(x[:, 8:]), weight, weight.flip(0))


def _concat_seven(x: Tensor) -> Tensor:
    return torch.cat([x, x.relu(), x.sigmoid(), x.tanh(), x.abs(), -x, x + 1], 1)


def _upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


PICTURE, LINE, TOKENS = (1, 3, 8, 8), (1, 3, 16), (1, 6, 16)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, PICTURE),
    "attention": (Attention, TOKENS),
    "computed weight": (Computed, (8, 16)),
    "conv1d": (lambda: Net(nn.Conv1d(3, 8, 3), F.relu), LINE),
    "prelu": (lambda: Net(nn.Conv2d(3, 8, 3), nn.PReLU(8)), PICTURE),
    "hardswish": (lambda: Net(nn.Conv2d(3, 8, 3), F.hardswish), PICTURE),
    "batch norm": (lambda: Net(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3)), PICTURE),
    "concat of seven": (lambda: Net(nn.Conv2d(3, 8, 3), _concat_seven), PICTURE),
    "bilinear": (lambda: Net(nn.Conv2d(3, 8, 3), _upsample), PICTURE),
    "pad": (lambda: Net(nn.Conv2d(3, 8, 3), lambda x: F.pad(x, (1, 2, 1, 2))), PICTURE),
    "pool that XNNPACK rejects": (lambda: Net(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, ceil_mode=True)), PICTURE),
}
QUICK = ("conv1d",)


def _quantized(name: str) -> tuple[fx.GraphModule, tuple[Tensor]]:
    torch.manual_seed(0)
    make, shape = NETS[name]
    inputs = (torch.randn(shape),)
    return quantize(make().eval(), inputs, forward_loop=[inputs], target="executorch"), inputs


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NETS])
@pytest.mark.filterwarnings("ignore::scalepoint.errors.ScalepointWarning")  # the computed weight fixes the batch
def test_a_program_has_the_same_bytes_without_the_patch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    from scalepoint.compat import executorch_partitioner

    model, inputs = _quantized(name)
    ours = export(model, tmp_path / "ours.pte", inputs).read_bytes()
    monkeypatch.setattr(passes, "TESTED_VERSIONS", ())
    monkeypatch.setattr(executorch_partitioner, "SingleDecompositionPartitioner", XnnpackPartitioner)
    assert export(model, tmp_path / "plain.pte", inputs).read_bytes() == ours


def _managers() -> tuple[object, object]:
    """XNNPACK's pass manager outside and inside the block."""
    from executorch.backends.xnnpack import xnnpack_preprocess

    outside = getattr(xnnpack_preprocess, "XNNPACKPassManager", None)
    with passes.without_idle_passes():
        inside = getattr(xnnpack_preprocess, "XNNPACKPassManager", None)
    assert getattr(xnnpack_preprocess, "XNNPACKPassManager", None) is outside
    return outside, inside


def test_the_installed_executorch_was_tested_and_has_no_new_passes() -> None:
    from executorch.backends.xnnpack import _passes

    outside, inside = _managers()
    assert inside is not outside
    assert all(hasattr(_passes, name) for name in passes.CHANGES_BY_PASS)


@pytest.mark.parametrize("installed_version", ["0.9.0", "99.0", None])
def test_all_passes_run_with_another_version(installed_version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if installed_version is None:
            raise PackageNotFoundError(package)
        return installed_version

    monkeypatch.setattr(passes, "version", version)
    outside, inside = _managers()
    assert inside is outside


def test_nothing_is_replaced_where_the_name_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from executorch.backends.xnnpack import xnnpack_preprocess

    monkeypatch.delattr(xnnpack_preprocess, "XNNPACKPassManager")
    assert _managers() == (None, None)


def test_the_name_is_restored_after_an_error() -> None:
    from executorch.backends.xnnpack import xnnpack_preprocess

    outside = xnnpack_preprocess.XNNPACKPassManager
    with pytest.raises(ZeroDivisionError), passes.without_idle_passes():
        _ = 1 / 0
    assert xnnpack_preprocess.XNNPACKPassManager is outside
