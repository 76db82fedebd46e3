"""Experts of a mixture: each is tuned on the rows that the router sends to it; experts without rows are reported."""

import pytest
import torch
from torch import nn

from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.tuning import TuneConfig, tune

FOUR = QuantConfig(activation="float", weight=TensorQuantConfig(n_bits=4, per_channel=True))
SIZE = 16


class Mixture(nn.Module):
    """Sends every row to one of four experts: the third gets few rows, the last none."""

    def __init__(self, by_index: bool) -> None:
        super().__init__()
        self.by_index = by_index
        self.router = nn.Linear(SIZE, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))
        with torch.no_grad():
            self.router.weight.zero_()[:, 0] = torch.tensor([1.0, -1.0, 0.0, 0.0])
            self.router.weight[2, 1], self.router.weight[3, 2] = 1e-3, -1e3

    def forward(self, x):
        scores = self.router(x)
        chosen, y = scores.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.by_index:
                rows = torch.where(chosen == number)[0]
                y = y.index_add(0, rows, expert(x[rows]))
            else:
                y = y + expert(x * (chosen == number)[:, None].to(x.dtype))
        return y


def rows(seed):
    x = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(seed))
    x[:, 2] = 1.0  # never to the last
    x[0, 0], x[0, 1] = 0.0, 1.0  # to the third
    return x


@pytest.mark.parametrize("by_index", [False, True], ids=["masked", "picked"])
def test_an_expert_with_few_rows_or_none_is_rounded_to_nearest_and_reported(by_index):
    torch.manual_seed(0)
    model, data = Mixture(by_index).eval(), [rows(seed) for seed in range(4)]
    quantized = quantize(model, data[0], FOUR, forward_loop=data, progress=False)
    before = {name: module.get_deployed().codes.clone() for name, module in layers(quantized).items()}
    report = tune(quantized, data, TuneConfig(steps=("target", "scale", "gptq", "descend")), progress=False)
    solved = {row.name: row for row in report.layers}
    assert {"experts.0", "experts.1"} <= solved.keys()
    assert 180 < solved["experts.0"].rows + solved["experts.1"].rows <= 256
    for number in (0, 1):
        assert solved[f"experts.{number}"].after < solved[f"experts.{number}"].before
    assert "4 rows reached it" in report.left["experts.2"]
    assert "no rows reached it" in report.left["experts.3"]
    after = {name: module.get_deployed().codes for name, module in layers(quantized).items()}
    for number, is_moved in enumerate((True, True, False, False)):
        (name,) = [name for name in before if f"experts.{number}" in name]
        assert torch.equal(before[name], after[name]) != is_moved


def layers(model):
    quantized = {name: module for name, module in model.named_modules() if hasattr(module, "get_deployed")}
    return {name: module for name, module in quantized.items() if "experts" in name}


def test_rows_that_a_quantized_router_sends_to_another_expert_are_not_compared():
    """The rows of the two streams differ then, so an expert is compared with its own float weight."""
    torch.manual_seed(0)
    model = Mixture(by_index=True).eval()
    with torch.no_grad():
        model.router.weight.copy_(torch.randn(4, SIZE))
    data = [torch.randn(64, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    quantized = quantize(model, data[0], FOUR, forward_loop=data, progress=False)
    report = tune(quantized, data, TuneConfig(steps=("target", "scale", "gptq", "descend")), progress=False)
    solved = {row.name: row for row in report.layers}
    for number in range(4):
        row = solved[f"experts.{number}"]
        assert row.after < row.before < 0.05
