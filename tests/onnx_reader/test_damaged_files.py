"""200 files with changed nodes, attributes, tensors and bytes: read, or refused with our own error; never a hang."""

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import onnx
import pytest
import torch
from google.protobuf.message import DecodeError
from onnx import AttributeProto, ModelProto, TensorProto, numpy_helper

import scalepoint
from scalepoint.errors import ScalepointError
from tests.onnx_reader import graphs

COUNT = 200
SECONDS = 20  # a file that takes longer hangs
ODD_NUMBERS = (0, -1, 1, 7, 2**31 - 1, 2**40, -(2**63))


def _network() -> ModelProto:
    """Convolutions, shape arithmetic, attention by hand, an LSTM, a loop and a branch."""
    model = graphs.model_of(
        """net (float[N, 3, 8, 8] x, int64 rate) => (float[N, 4] y, float[8] total) {
            a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, conv_weight, conv_bias)
            b = BatchNormalization<epsilon = 0.001>(a, gamma, beta, mean, variance)
            c = Clip(b, low, high)
            pooled = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c)
            bigger = Resize<mode = "nearest">(pooled, , scales)
            padded = Pad<mode = "reflect">(bigger, pads)
            part = Slice(padded, starts, ends, axes)
            s = Shape(part)
            first = Constant<value_ints = [0]>()
            n = Gather(s, first)
            rest = Constant<value_ints = [-1, 8]>()
            target = Concat<axis = 0>(n, rest)
            rows = Reshape(part, target)
            keys = MatMul(rows, square)
            turned = Transpose<perm = [0, 2, 1]>(keys)
            scores = MatMul(rows, turned)
            weights = Softmax<axis = -1>(scores)
            mixed = MatMul(weights, rows)
            steps = Transpose<perm = [1, 0, 2]>(mixed)
            states, last, cell = LSTM<hidden_size = 4>(steps, lstm_w, lstm_r, lstm_b)
            flat = Squeeze(last, first)
            y = Gemm<transB = 1>(flat, head)
            count = Constant<value_int = 3>()
            go = Constant<value = bool {1}>()
            mean_row = ReduceMean<keepdims = 0>(rows, both)
            doubled = Loop(count, go, mean_row) <
                body = b (int64 i, bool k, float[8] v) => (bool d, float[8] w) { d = Identity(k) w = Add(v, v) }
            >
            limit = Constant<value_int = 1>()
            is_fast = Equal(rate, limit)
            total = If(is_fast) <
                then_branch = t () => (float[8] p) { p = Neg(doubled) },
                else_branch = e () => (float[8] q) { q = Sqrt(doubled) }
            >
        }""",
        conv_weight=graphs.random(4, 3, 3, 3),
        conv_bias=graphs.random(4),
        gamma=np.ones(4, np.float32),
        beta=np.zeros(4, np.float32),
        mean=np.zeros(4, np.float32),
        variance=np.ones(4, np.float32),
        low=np.float32(0),
        high=np.float32(6),
        scales=np.array([1, 1, 2, 2], np.float32),
        pads=np.array([0, 0, 2, 2, 0, 0, 2, 2]),
        starts=np.array([0, 0]),
        ends=np.array([8, 8]),
        axes=np.array([2, 3]),
        square=graphs.random(8, 8),
        lstm_w=graphs.random(1, 16, 8),
        lstm_r=graphs.random(1, 16, 4),
        lstm_b=graphs.random(1, 32),
        head=graphs.random(4, 4),
        both=np.array([0, 1]),
    )
    onnx.checker.check_model(model)
    return model


def _change_node(model: ModelProto, generator: random.Random) -> None:
    nodes = model.graph.node
    node = generator.choice(nodes)
    choice = generator.randrange(6)
    if choice == 0:
        nodes.remove(node)
    elif choice == 1:
        node.op_type = generator.choice([other.op_type for other in nodes] + ["NoSuchOperator"])
    elif choice == 2 and node.input:
        node.input[generator.randrange(len(node.input))] = generator.choice(["", "missing", "x", node.output[0]])
    elif choice == 3:
        node.input.extend(["x", "square"])
    elif choice == 4 and node.input:
        node.input.pop()
    else:
        node.output[0] = generator.choice(["", "x", "y", "rows"])


def _change_attribute(model: ModelProto, generator: random.Random) -> None:
    node = generator.choice([node for node in model.graph.node if node.attribute])
    attribute = generator.choice(node.attribute)
    if attribute.type == AttributeProto.INTS and attribute.ints:
        attribute.ints[generator.randrange(len(attribute.ints))] = generator.choice(ODD_NUMBERS)
    elif attribute.type == AttributeProto.INT:
        attribute.i = generator.choice(ODD_NUMBERS)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = generator.choice([0.0, -1.0, float("nan"), float("inf")])
    elif attribute.type == AttributeProto.GRAPH:
        attribute.g.node[0].input[0] = "missing"
    else:
        node.attribute.remove(attribute)


def _change_tensor(model: ModelProto, generator: random.Random) -> None:
    tensor = generator.choice(model.graph.initializer)
    choice = generator.randrange(5)
    if choice == 0:
        tensor.dims[:] = [generator.choice((0, 1, 2**20, 2**40)) for _ in tensor.dims]
    elif choice == 1:
        tensor.data_type = generator.choice(TensorProto.DataType.values())
    elif choice == 2:
        tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]
    elif choice == 3:
        model.graph.initializer.remove(tensor)
    else:
        values = numpy_helper.to_array(tensor)
        odd = np.full(values.shape, generator.choice(ODD_NUMBERS)).astype(values.dtype)
        tensor.CopyFrom(numpy_helper.from_array(odd, tensor.name))


def _change_bytes(model: ModelProto, generator: random.Random) -> None:
    data = bytearray(model.SerializeToString())
    for _ in range(generator.randrange(1, 6)):
        data[generator.randrange(len(data))] = generator.randrange(256)
    model.ParseFromString(bytes(data))


CHANGES: tuple[Callable[[ModelProto, random.Random], None], ...] = (
    _change_node,
    _change_attribute,
    _change_tensor,
    _change_bytes,
)


@pytest.fixture
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"reading a damaged file took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_the_undamaged_file_runs():
    loaded = scalepoint.load_onnx(_network())
    assert [value.shape for value in loaded(torch.randn(2, 3, 8, 8), torch.tensor(1))] == [(2, 4), (8,)]


def test_a_loop_without_a_body_is_refused():
    model = _network()
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    del loop.attribute[:]
    with pytest.raises(ScalepointError, match="body is missing"):
        scalepoint.load_onnx(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("time_limit")
def test_damaged_files_are_read_or_refused():
    original, outcomes = _network().SerializeToString(), Counter()
    for seed in range(COUNT):
        generator, model = random.Random(seed), ModelProto()  # noqa: S311
        model.ParseFromString(original)
        try:
            CHANGES[seed % len(CHANGES)](model, generator)
        except DecodeError:  # these bytes are no protobuf at all: test_damaged.py reads such files
            outcomes["no protobuf"] += 1
            continue
        signal.alarm(SECONDS)
        try:
            loaded = scalepoint.load_onnx(model)
            loaded(*loaded.make_example({}).values())
            outcomes["runs"] += 1
        except ScalepointError:
            outcomes["refused"] += 1
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    assert outcomes["refused"] > COUNT / 3
    assert outcomes["runs"] > 10
