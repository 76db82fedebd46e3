"""For which CPUs a file is: chosen or automatic, told, and kept in the file."""

from dataclasses import replace

import onnx
import pytest
import torch
from onnx import numpy_helper as nh
from torch import nn

import scalepoint
from scalepoint.errors import ScalepointWarning, TargetError, UsageError
from scalepoint.formats import find_format
from scalepoint.options import DeployConfig
from scalepoint.support.cpu import instruction_set
from scalepoint.targets import find_target, onnxruntime_target
from tests.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
HERE = instruction_set()
OTHER = {"vnni": "avx2", "avx2": "vnni", "arm": "avx2"}[HERE]
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def deploy(folder, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    options = {"progress": False, "smoke": True, "strict": True, "allow_departure": True, **options}
    return scalepoint.deploy(model, X, [X], output=folder, **options)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
@pytest.mark.filterwarnings("ignore:.*VNNI")
def test_verification_notes_that_the_file_is_for_another_cpu(tmp_path, target):
    done = deploy(tmp_path, target=target, cpu=OTHER)
    assert find_format("onnx").about(done.path).made_for["cpu"] == OTHER
    assert f"cpu {OTHER}; verified on another CPU, {HERE}" in done.verification.origin
    assert ("made for", done.verification.origin) in done.verification.rows()
    assert DeployConfig.from_file(tmp_path / "config.yaml").cpu == OTHER


@pytest.mark.filterwarnings("ignore:.*ARM")
def test_a_file_for_arm_uses_all_bits_of_the_weights_and_every_int8_kernel(tmp_path, capsys):
    done = deploy(tmp_path, cpu="arm", smoke=False, placement="predicted", strict=False, progress=True)
    assert find_format("onnx").about(done.path).made_for["cpu"] == "arm"
    assert {row.state for row in done.coverage.operations} == {"quantized"}
    codes = [nh.to_array(tensor) for tensor in onnx.load(done.path).graph.initializer if tensor.data_type == 3]
    assert max(int(abs(array).max()) for array in codes if array.ndim == 2) == 127
    if HERE != "arm":
        assert "the file is for another CPU (arm), so no times are known" in capsys.readouterr().err


def test_a_file_for_another_cpu_names_the_times_that_place_its_layers(tmp_path, capsys):
    deploy(tmp_path, cpu=OTHER, smoke=False, placement="predicted", strict=False, progress=True)
    assert (
        f"another CPU ({OTHER}), so layers stay float by shipped times (onnxruntime-{OTHER}" in capsys.readouterr().err
    )


def test_openvino_has_no_files_for_arm(tmp_path):
    with raises(TargetError, "'arm'", "onnxruntime"):
        deploy(tmp_path, target="openvino", cpu="arm")


def test_a_file_for_this_cpu_has_no_note(tmp_path):
    done = deploy(tmp_path, cpu=HERE)
    assert "another CPU" not in str(done.verification)
    assert find_format("onnx").about(done.path).made_for["cpu"] == HERE


def test_an_automatic_choice_is_printed_in_one_line_and_recorded(tmp_path, capsys):
    deploy(tmp_path / "auto", progress=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cpu: ")]
    assert f"--cpu {OTHER}" in line
    assert DeployConfig.from_file(tmp_path / "auto" / "config.yaml").cpu == HERE  # another machine makes the same file
    deploy(tmp_path / "chosen", progress=True, cpu=HERE)
    deploy(tmp_path / "weights", progress=True, config={"activation": "float"})
    assert "cpu: " not in capsys.readouterr().err


def test_a_target_of_another_package_may_have_an_option_of_the_same_name(tmp_path):
    custom_target = replace(onnxruntime_target(cpu=HERE), name="mine", options={"cpu": "arm"})
    deploy(tmp_path, target=custom_target)
    assert DeployConfig.from_file(tmp_path / "config.yaml").cpu == "auto"


def test_an_invalid_cpu_is_refused_before_any_work(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'avx2'"):
        deploy(tmp_path, cpu="avx-2")
    with raises(UsageError, "cpu=", "'tensorrt'"):
        deploy(tmp_path, target="tensorrt", cpu="avx2")
    with pytest.raises(UsageError, match="contradicts the target"):
        deploy(tmp_path, target=onnxruntime_target(cpu=HERE), cpu=OTHER)
    assert find_target(onnxruntime_target(cpu=OTHER)).options["cpu"] == OTHER
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*VNNI")
def test_a_run_that_is_resumed_for_another_cpu_starts_again(tmp_path):
    def fail(run):
        raise RuntimeError("no metric")

    with pytest.raises(Exception, match="no metric"):
        deploy(tmp_path, cpu=HERE, evaluate=lambda run: 1.0 if isinstance(run, nn.Module) else fail(run))
    with pytest.warns(ScalepointWarning, match="the target changed"):
        done = deploy(tmp_path, cpu=OTHER, resume=True)
    assert find_format("onnx").about(done.path).made_for["cpu"] == OTHER
