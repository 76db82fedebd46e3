"""Threads, data loader workers, memory, and models and files of other projects."""

from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scalepoint
from scalepoint.cli.exit_codes import Code, report_error
from scalepoint.errors import ScalepointError
from scalepoint.quantize import quantize

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "saved-0.1.0.dev0"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3)).eval()


def test_one_thread_or_four_make_the_same_bytes(tmp_path) -> None:
    data = [torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(index)) for index in range(3)]
    before, files = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            quantized = quantize(net(), data[0], forward_loop=data, freeze_weights=True, target="onnxruntime")
            scalepoint.export(quantized, tmp_path / f"{threads}.onnx", data[0])
            files.append((tmp_path / f"{threads}.onnx").read_bytes())
    finally:
        torch.set_num_threads(before)
    assert files[0] == files[1]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_loaders_with_workers_give_the_same_ranges(start) -> None:
    pictures = TensorDataset(torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    states = []
    for workers in ({}, {"num_workers": 1, "multiprocessing_context": start}):
        loader = DataLoader(pictures, batch_size=4, **workers)
        quantized = quantize(net(), torch.randn(2, 3, 8, 8), forward_loop=loader)
        states.append(quantized.state_dict())
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


def test_out_of_memory_names_the_batch_and_the_smaller_setting(capsys) -> None:
    def batches():
        yield torch.randn(2, 3, 8, 8)
        raise MemoryError

    with pytest.raises(MemoryError) as raised:
        quantize(net(), torch.randn(2, 3, 8, 8), forward_loop=batches())
    assert any("batch 1" in note for note in raised.value.__notes__)
    assert report_error(raised.value, "deploy", is_json=False, is_debug=False) == Code.USAGE
    assert "--batch-size" in capsys.readouterr().err


def test_a_folder_of_an_earlier_release_loads() -> None:
    """The folder is never written again: a later release adds a folder of its own next to it."""
    model = scalepoint.load(GOLDEN)
    example = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
    with torch.no_grad():
        output = model(example)
    expected = torch.tensor([float(number) for number in (GOLDEN / "expected.txt").read_text().split()])
    torch.testing.assert_close(output.flatten(), expected, rtol=1e-5, atol=1e-6)


def node_models(step):
    """ONNX's own models of one node, of every so many of its operators: those of all take seconds to make."""
    from onnx.backend.test.case import node

    for path in sorted(Path(node.__file__).parent.glob("*.py"))[1::step]:
        import_module(f"{node.__name__}.{path.stem}")
    return list(node._NodeTestCases)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of onnx, while it makes its own cases
@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_the_node_models_of_onnx_are_read_or_refused_without_a_traceback(tmp_path, step) -> None:
    import onnx

    cases = node_models(step)
    assert len(cases) > 40
    for case in cases:
        model = case.model if case.model is not None else onnx.load(Path(case.model_dir) / "model.onnx")
        onnx.save(model, tmp_path / "model.onnx")
        with suppress(ScalepointError):
            scalepoint.check(tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::scalepoint.errors.ScalepointWarning", "ignore::FutureWarning")
def test_the_export_examples_of_torch_are_captured_or_refused_without_a_traceback() -> None:
    from torch._export.db.examples import all_examples

    from scalepoint.graph import capture

    done = 0
    for case in all_examples().values():
        with suppress(ScalepointError):
            capture(case.model, case.example_args, case.example_kwargs)
            done += 1
    assert done >= 15
