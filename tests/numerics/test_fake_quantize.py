"""Fake quantization: forward and backward, for every code path, layout and input dtype."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from scalepoint.numerics import (
    QParams,
    block_view,
    choose_qparams,
    dequantize,
    dtype_name,
    fake_quantize,
    is_traced,
    make_steps,
    min_max,
    quantize,
)
from scalepoint.numerics.affine import MIN_INDEXED_ELEMENTS, PIECE_ELEMENTS, round_trip_traced
from tests import reference
from tests.reference import grid_of

GRIDS = {
    "int8": ("int8", "symmetric"),
    "int8_clipping": ("int8", "symmetric_with_clipping"),
    "uint8_asymmetric": ("uint8", "asymmetric"),
    "int8_minval": ("int8", "asymmetric", "minval"),
    "int4": ("int4", "symmetric"),
    "e4m3": ("float8_e4m3fn",),
    "e5m2": ("float8_e5m2",),
    "fp4_e8m0": ("float4_e2m1fn_x2", "symmetric", "zp", "float8_e8m0fnu"),
}
EACH_GRID = pytest.mark.parametrize("grid", [grid_of(*row) for row in GRIDS.values()], ids=GRIDS.keys())
TWO_GRIDS = pytest.mark.parametrize("grid", [grid_of(*GRIDS[key]) for key in ("int8", "e4m3")], ids=["int8", "e4m3"])


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clipping_qparams(x, grid, block):
    """Parameters for 40 % of the range, so that some values are clamped."""
    low, high = min_max(x, block)
    return choose_qparams(low * 0.4, high * 0.4, grid)


def is_bit_equal(first, second):
    """Equal in every bit, also of NaN."""
    int_dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return first.dtype == second.dtype and torch.equal(
        first.contiguous().view(int_dtype), second.contiguous().view(int_dtype)
    )


# ---- torch's own operators ----------------------------------------------------------------------------------


def near_a_tie(x, scale):
    """Whether float32 may round x / scale and x * (1 / scale) to different integers."""
    t = x.double() / scale.double()
    return ((t - t.floor()) - 0.5).abs() <= t.abs() * 2.0**-22


@pytest.mark.parametrize(
    ("name", "scale", "zero_point"),
    [("int8", 0.0173, 0), ("int8", 1 / 3, -7), ("uint8", 0.05, 128), ("uint8", 2.0**-5, 37), ("int4", 0.3, 0)],
)
def test_it_equals_the_per_tensor_operator_of_torch_except_near_ties(name, scale, zero_point):
    grid = grid_of(name, "asymmetric")
    x = randn(400_000) * scale * (grid.high - grid.low) / 4
    qparams = QParams(torch.tensor([scale]), torch.tensor([zero_point], dtype=torch.int32), torch.zeros(1))
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, int(grid.low), int(grid.high))
    differs = fake_quantize(x, qparams, grid) != theirs
    assert near_a_tie(x[differs], torch.tensor(scale)).all()
    assert differs.sum() <= 4


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["int8", "uint8", "int4"])
def test_it_equals_the_per_channel_operator_of_torch_except_near_ties(name, axis):
    grid = grid_of(name, "asymmetric")
    x = randn(40, 50, 60)
    block = tuple(1 if at == axis else size for at, size in enumerate(x.shape))
    qparams = clipping_qparams(x, grid, block)
    theirs = torch.fake_quantize_per_channel_affine(
        x, qparams.scale.flatten(), qparams.zero_point.flatten(), axis, int(grid.low), int(grid.high)
    )
    differs = fake_quantize(x, qparams, grid, block) != theirs
    assert near_a_tie(x, qparams.scale)[differs].all()
    assert differs.sum() <= 4


@pytest.mark.parametrize("size", [1000, 3 * PIECE_ELEMENTS], ids=["small", "large"])
@pytest.mark.parametrize("name", ["int8", "uint8", "int2"])
def test_its_gradient_equals_that_of_the_per_tensor_operator_of_torch(name, size):
    grid = grid_of(name, "asymmetric")
    x = randn(size)
    qparams = clipping_qparams(x, grid, (size,))
    gradients = []
    for run in (
        lambda v: fake_quantize(v, qparams, grid),
        lambda v: torch.fake_quantize_per_tensor_affine(
            v, qparams.scale.item(), qparams.zero_point.item(), int(grid.low), int(grid.high)
        ),
    ):
        leaf = x.clone().requires_grad_()
        run(leaf).backward(randn(size, seed=1))
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert (gradients[0] == 0).any()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(6, 20), (300, 600)], ids=["small", "large"])
def test_its_gradient_equals_that_of_the_per_channel_operator_of_torch(shape, axis):
    grid = grid_of("int8", "asymmetric")
    x = randn(*shape)
    block = tuple(1 if at == axis else size for at, size in enumerate(shape))
    qparams = clipping_qparams(x, grid, block)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    fake_quantize(ours, qparams, grid, block).sum().backward()
    torch.fake_quantize_per_channel_affine(
        theirs, qparams.scale.flatten(), qparams.zero_point.flatten(), axis, -128, 127
    ).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    assert ours.grad.unique().tolist() == [0.0, 1.0]


# ---- the straight-through gradient --------------------------------------------------------------------------


def test_an_integer_passes_the_gradient_where_the_rounded_value_is_in_the_range():
    x = torch.tensor([-128.6, -128.5, -128.0, -0.2, 0.0, 127.0, 127.49, 127.5, 300.0], requires_grad=True)
    qparams = QParams(torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    fake_quantize(x, qparams, grid_of("int8")).backward(torch.full((9,), 3.0))
    assert x.grad.tolist() == [0, 3, 3, 3, 3, 3, 3, 0, 0]


def test_a_float_passes_the_gradient_where_the_value_is_in_the_range():
    x = torch.tensor([-1000.0, -448.1, -448.0, -1e-9, 0.0, 0.3, 448.0, 448.1, torch.inf], requires_grad=True)
    fake_quantize(x, QParams(torch.ones(1)), grid_of("float8_e4m3fn")).backward(torch.full((9,), 3.0))
    assert x.grad.tolist() == [0, 0, 3, 3, 3, 3, 3, 0, 0]


@EACH_GRID
@pytest.mark.parametrize("shape", [(7, 9), (3, PIECE_ELEMENTS)], ids=["small", "large"])
def test_the_gradient_is_one_inside_and_zero_where_clamped(grid, shape):
    x = randn(*shape)
    block = (1, shape[1])
    qparams = clipping_qparams(x, grid, block)
    leaf = x.clone().requires_grad_()
    fake_quantize(leaf, qparams, grid, block).sum().backward()
    if grid.formulation == "minval":
        t = (x - qparams.minval) / qparams.scale + grid.low
    else:
        t = x / qparams.scale + (0 if qparams.zero_point is None else qparams.zero_point)
    outside = (t < grid.low - 0.51) | (t > grid.high + 0.51)
    inside = (t > grid.low + 0.51) & (t < grid.high - 0.51)
    assert outside.any()
    assert (leaf.grad[outside] == 0).all()
    assert (leaf.grad[inside] == 1).all()


@pytest.mark.parametrize(
    "size",
    [MIN_INDEXED_ELEMENTS, MIN_INDEXED_ELEMENTS + 100, 3 * PIECE_ELEMENTS + 17],
    ids=["one table", "table and rest", "pieces"],
)
@pytest.mark.parametrize("where", ["none", "one", "few", "a range", "many", "first and last", "NaN"])
def test_the_gradient_is_zero_for_clamped_values_however_many_there_are(size, where):
    x = randn(size).clamp_(-3, 3)
    generator = torch.Generator().manual_seed(1)
    indices = {
        "none": torch.tensor([], dtype=torch.int64),
        "one": torch.tensor([size // 2]),
        "few": torch.randint(size, (20,), generator=generator),
        "a range": torch.arange(size // 3, size // 2),
        "many": torch.randint(size, (size // 2,), generator=generator),
        "first and last": torch.tensor([0, size - 1]),
        "NaN": torch.tensor([5, size - 2]),
    }[where]
    x[indices] = math.nan if where == "NaN" else 9.0 * (1 - 2 * (indices % 2)).float()
    x.requires_grad_()
    saved_bytes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_bytes.append(t.nbytes) or t, lambda t: t):
        y = fake_quantize(x, QParams(torch.tensor([0.04]), torch.zeros(1, dtype=torch.int32)), grid_of("int8"))
        y.backward(torch.full((size,), 2.0))
    expected = torch.full((size,), 2.0)
    expected[indices] = 0.0
    assert torch.equal(x.grad, expected)
    assert sum(saved_bytes) <= (size if size < PIECE_ELEMENTS or where in ("many", "a range") else 8 * len(indices))


def test_scale_zero_point_and_minval_get_no_gradient():
    x = randn(5, 6).requires_grad_()
    grid = grid_of("int8", "asymmetric", "minval")
    minval = torch.tensor([-1.0], requires_grad=True)
    y = fake_quantize(x, QParams(torch.tensor([0.01]), torch.zeros(1, dtype=torch.int32), minval), grid)
    y.sum().backward()
    assert minval.grad is None
    assert x.grad is not None


def nodes_of(y):
    """Every autograd node from y down to the leaves, without AccumulateGrad."""
    nodes, pending = [], [y.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and "AccumulateGrad" not in node.name():
            nodes.append(node)
            pending += [following for following, _ in node.next_functions]
    return nodes


@EACH_GRID
@pytest.mark.parametrize("block", [None, (8, 24), (1, 24), (8, 1)], ids=["none", "tensor", "channel_0", "channel_1"])
def test_it_is_one_autograd_node(grid, block):
    x = randn(8, 24).requires_grad_()
    y = fake_quantize(x, clipping_qparams(x.detach(), grid, block or (8, 24)), grid, block)
    assert len(nodes_of(y)) == 1
    (following,) = [node for node, _ in y.grad_fn.next_functions if node is not None]
    assert following.variable is x


def test_with_blocks_it_is_one_autograd_node_and_views():
    x = randn(8, 24).requires_grad_()
    grid = grid_of("int8")
    names = [
        node.name() for node in nodes_of(fake_quantize(x, clipping_qparams(x.detach(), grid, (2, 8)), grid, (2, 8)))
    ]
    assert len([name for name in names if "View" not in name]) == 1


@EACH_GRID
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("shape", [(10, 100), (3, PIECE_ELEMENTS)], ids=["small", "large"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
def test_it_saves_at_most_one_byte_per_element_for_backward(grid, dtype, shape, per_channel):
    x = randn(*shape).to(dtype)
    block = (1, shape[1]) if per_channel else shape
    qparams = clipping_qparams(x, grid, block)
    x.requires_grad_()
    saved_bytes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_bytes.append(t.nbytes) or t, lambda t: t):
        fake_quantize(x, qparams, grid, block).sum().backward()
    assert 0 < sum(saved_bytes) <= x.numel()


def test_a_large_tensor_without_clamped_values_saves_nothing():
    x = (torch.rand(2 * PIECE_ELEMENTS) - 0.5).requires_grad_()
    saved_bytes = []
    qparams = QParams(torch.tensor([0.01]), torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_bytes.append(t.nbytes) or t, lambda t: t):
        fake_quantize(x, qparams, grid_of("int8"), fixed_zero=True).sum().backward()
    assert saved_bytes == []
    assert (x.grad == 1).all()


def test_threads_do_not_write_into_each_others_scratch():
    grid = grid_of("float8_e4m3fn")
    tensors = [randn(3 * PIECE_ELEMENTS) * (1 + number) for number in range(4)]
    qparams = [QParams(torch.tensor([0.01 * (1 + number)])) for number in range(4)]
    expected_outputs = [fake_quantize(x, params, grid) for x, params in zip(tensors, qparams, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda pair: fake_quantize(*pair, grid), 5 * list(zip(tensors, qparams, strict=True))))
    assert all(map(torch.equal, outputs, 5 * expected_outputs))


# ---- the three paths: at once, in pieces, traced ---------------------------------------------------------------

LARGE = {
    "per_tensor": ((2 * PIECE_ELEMENTS + 17,), (2 * PIECE_ELEMENTS + 17,)),
    "channel_0": ((192, 1500), (1, 1500)),
    "channel_1": ((192, 1500), (192, 1)),
    "channel_1_of_one_row": ((1, 3, 100_000), (1, 1, 100_000)),
    "block_32": ((600, 512), (1, 32)),
    "tile": ((768, 400), (64, 40)),
}


def small_path(x, qparams, grid, block):
    """Fake-quantize in parts that are too small to be processed in pieces."""
    if block == tuple(x.shape):
        flat = qparams.map(lambda value: value.reshape(1))
        return torch.cat([fake_quantize(part, flat, grid) for part in x.flatten().split(1000)]).view(x.shape)
    params = qparams.map(lambda value: torch.from_numpy(reference.spread(value.numpy(), x.shape, block)).flatten())
    pieces = [
        fake_quantize(part, params.map(lambda value: value[start : start + 1000]), grid)  # noqa: B023  # used at once
        for start, part in zip(range(0, x.numel(), 1000), x.flatten().split(1000), strict=True)
    ]
    return torch.cat(pieces).view(x.shape)


@EACH_GRID
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("layout", LARGE)
def test_in_pieces_it_is_bit_equal_to_small_tensors_and_to_the_traced_path(grid, dtype, layout):
    shape, block = LARGE[layout]
    x = randn(*shape).to(dtype)
    assert x.numel() >= 2 * PIECE_ELEMENTS
    qparams = clipping_qparams(x, grid, block)
    y = fake_quantize(x, qparams, grid, block)
    assert is_bit_equal(y, small_path(x, qparams, grid, block))

    view = block_view(shape, block)
    steps = make_steps(qparams.map(lambda value: value.view(view.params)), grid)
    traced, inside = round_trip_traced(x.to(torch.float32).view(view.tensor), steps, grid.format)
    assert is_bit_equal(y, traced.view(shape).to(dtype))

    leaf = x.clone().requires_grad_()
    with_gradient = fake_quantize(leaf, qparams, grid, block)
    with_gradient.sum().backward()
    assert is_bit_equal(with_gradient.detach(), y)
    assert torch.equal(leaf.grad, inside.view(shape).to(dtype))


def test_parameters_of_lower_rank_broadcast_the_same_in_small_and_large_tensors():
    grid = grid_of("int8")
    x = randn(512, 512)
    qparams = QParams(torch.linspace(0.01, 0.03, 512), torch.zeros(512, dtype=torch.int32), torch.zeros(512))
    rows = torch.cat([fake_quantize(part, qparams, grid) for part in x.split(64)])
    assert torch.equal(fake_quantize(x, qparams, grid), rows)


@EACH_GRID
@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_values_and_gradients_are_the_same_while_compiling(grid, layout, monkeypatch):
    shape, block = reference.LAYOUTS[layout]
    x = randn(*shape)
    qparams = clipping_qparams(x, grid, block)
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=compiling: answer)
        assert is_traced(x) is compiling
        leaf = x.clone().requires_grad_()
        y = fake_quantize(leaf, qparams, grid, block)
        y.backward(randn(*shape, seed=1))
        results.append((y.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@EACH_GRID
@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_it_equals_dequantize_of_quantize(grid, layout):
    shape, block = reference.LAYOUTS[layout]
    x = randn(*shape)
    qparams = clipping_qparams(x, grid, block)
    codes = quantize(x, qparams, grid, block)
    assert torch.equal(dequantize(codes, qparams, grid, block), fake_quantize(x, qparams, grid, block))


@pytest.mark.parametrize("name", ["int8", "uint8", "uint4"])
def test_a_fixed_zero_point_changes_nothing_for_a_symmetric_grid(name):
    grid = grid_of(name)
    x = randn(40, 50)
    qparams = clipping_qparams(x, grid, (1, 50))
    plain = fake_quantize(x, qparams, grid, (1, 50))
    assert is_bit_equal(fake_quantize(x, qparams, grid, (1, 50), fixed_zero=True), plain)


# ---- out= ----------------------------------------------------------------------------------------------------


@EACH_GRID
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("layout", [*reference.LAYOUTS, *(f"large_{name}" for name in LARGE)])
def test_the_result_is_written_to_out(grid, dtype, layout):
    shape, block = reference.LAYOUTS[layout] if layout in reference.LAYOUTS else LARGE[layout.removeprefix("large_")]
    x = randn(*shape).to(dtype)
    qparams = clipping_qparams(x, grid, block)
    expected = fake_quantize(x, qparams, grid, block)
    out = torch.full_like(x, 77.0)
    y = fake_quantize(x, qparams, grid, block, out=out)
    assert y.data_ptr() == out.data_ptr()
    assert is_bit_equal(out, expected)


@TWO_GRIDS
@pytest.mark.parametrize("size", [100, 2 * PIECE_ELEMENTS], ids=["small", "large"])
def test_the_input_is_never_written_to(grid, size):
    x = randn(size)
    before = x.clone()
    qparams = clipping_qparams(x, grid, (size,))
    fake_quantize(x, qparams, grid)
    fake_quantize(x.requires_grad_(), qparams, grid)
    assert torch.equal(x, before)
    assert x._version == 0


# ---- dtypes and layouts --------------------------------------------------------------------------------------


@EACH_GRID
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("shape", [(10, 100), (3, PIECE_ELEMENTS)], ids=["small", "large"])
def test_the_arithmetic_is_float32_and_the_result_has_the_dtype_of_the_input(grid, dtype, shape):
    x = (randn(*shape).double() * 1.1).to(dtype)
    block = (1, shape[1])
    qparams = clipping_qparams(x, grid, block)
    assert qparams.scale.dtype == torch.float32
    y = fake_quantize(x, qparams, grid, block)
    assert is_bit_equal(y, fake_quantize(x.to(torch.float32), qparams, grid, block).to(dtype))
    leaf = x.clone().requires_grad_()
    fake_quantize(leaf, qparams, grid, block).sum().backward()
    assert leaf.grad.dtype == dtype


@pytest.mark.parametrize("scheme", reference.SCHEMES)
@pytest.mark.parametrize("name", ["int8", "uint8", "int4"])
def test_the_largest_float16_does_not_overflow(name, scheme):
    grid = grid_of(name, scheme)
    x = torch.tensor([-65504.0, 0.0, 65504.0], dtype=torch.float16)
    assert fake_quantize(x, choose_qparams(*min_max(x, (3,)), grid), grid).isfinite().all()


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


ARRANGEMENTS = {
    "channels_last": lambda: channels_last(randn(2, 6, 4, 5)),
    "transposed": lambda: randn(4, 5, 2, 6).permute(2, 3, 0, 1),
    "strided": lambda: randn(2, 6, 8, 10)[:, :, ::2, ::2],
    "expanded": lambda: randn(2, 6, 1, 5).expand(2, 6, 4, 5),
    "large_channels_last": lambda: channels_last(randn(2, 6, 120, 120)),
}
CUTS = {
    "none": None,
    "per_tensor": (-1, -1, -1, -1),
    "channel_0": (1, -1, -1, -1),
    "channel_1": (-1, 1, -1, -1),
    "block_3": (1, 3, -1, -1),
    "tile": (1, 2, 2, 5),
    "ragged": (1, 4, -1, -1),
}


@TWO_GRIDS
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_strides_change_no_bit_and_a_dense_layout_is_kept(grid, grad, cut, arrangement):
    x = ARRANGEMENTS[arrangement]()
    extents = CUTS[cut] or (-1, -1, -1, -1)
    block = tuple(size if extent == -1 else extent for size, extent in zip(x.shape, extents, strict=True))
    qparams = clipping_qparams(x.contiguous(), grid, block)
    block_or_none = None if cut == "none" else block
    expected = fake_quantize(x.contiguous(), qparams, grid, block_or_none)
    y = fake_quantize(x.detach().requires_grad_(grad), qparams, grid, block_or_none)
    assert is_bit_equal(y.detach(), expected)
    if arrangement not in ("strided", "expanded"):
        assert y.stride() == x.stride()


@TWO_GRIDS
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (1, 1, 1)], ids=str)
def test_tiny_and_empty_tensors_keep_their_shape(grid, shape):
    x = torch.full(shape, 0.33)
    zero = torch.zeros(1, dtype=torch.int32)
    qparams = QParams(torch.tensor([0.25]), zero, torch.zeros(1)).map(lambda value: value.reshape((1,) * len(shape)))
    y = fake_quantize(x, qparams, grid)
    assert y.shape == shape
    assert torch.equal(y, torch.full(shape, 0.25 if grid.format.name == "int8" else 0.34375))


# ---- transforms and learned scales ---------------------------------------------------------------------------


@EACH_GRID
@pytest.mark.parametrize("layout", ["per_tensor", "channel_0", "block_8_on_1", "tile_4x3", "ragged_tile_4x3"])
def test_vmap_and_func_grad_give_what_a_loop_and_backward_give(grid, layout):
    shape, block = reference.LAYOUTS[layout]
    batch = randn(3, *shape)
    qparams = clipping_qparams(batch[0], grid, block)

    def run(x):
        return fake_quantize(x, qparams, grid, block)

    def loss(x):
        return (run(x) * torch.arange(x.numel()).view(x.shape)).sum()

    leaf = batch.clone().requires_grad_()
    sum(loss(x) for x in leaf).backward()
    assert torch.equal(torch.vmap(run)(batch), torch.stack([run(x) for x in batch]))
    assert torch.equal(torch.func.grad(loss)(batch[1]), leaf.grad[1])
    assert torch.equal(torch.vmap(torch.func.grad(loss))(batch), leaf.grad)


LEARNED = {
    "int8": ("int8", "symmetric"),
    "uint4_asymmetric": ("uint4", "asymmetric"),
    "int4_minval": ("int4", "asymmetric", "minval"),
    "e4m3": ("float8_e4m3fn",),
}


@pytest.mark.parametrize("row", LEARNED.values(), ids=LEARNED.keys())
@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "compiling"])
def test_a_learned_scale_gets_the_gradient_of_lsq(row, compiling, monkeypatch):
    """dy/ds = code - x/s inside the range and the limit beyond it; here every element has its own scale."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    grid = grid_of(*row)
    x = (randn(500) * 3).requires_grad_()
    span = grid.high - grid.low
    scale = (torch.linspace(0.5, 1.5, 500) * (8 / span)).requires_grad_()
    zero_point = torch.full((500,), 6 if grid.scheme == "asymmetric" else grid.middle, dtype=torch.int32)
    qparams = QParams(scale, zero_point, torch.full((500,), -2.0))
    upstream = randn(500, seed=1)
    y = fake_quantize(x, qparams, grid)
    y.backward(upstream)

    value, step = x.detach().double().numpy(), scale.detach().double().numpy()
    if grid.formulation == "minval":
        t, low, high = (value + 2.0) / step, 0, span
    elif grid.format.is_float:
        t, low, high = value / step, grid.low, grid.high
    else:
        t, low, high = value / step, grid.low - zero_point[0].item(), grid.high - zero_point[0].item()
    rounded = t if grid.format.is_float else np.rint(t)
    inside = (rounded >= low) & (rounded <= high)
    codes = np.clip(rounded, low, high)
    if grid.format.is_float:
        codes = np.array([reference.nearest(code, grid.format.name) for code in codes], np.float64)
    expected = np.where(inside, codes - t, codes) * upstream.numpy()
    assert 0 < inside.sum() < 500
    np.testing.assert_allclose(scale.grad.numpy(), expected, rtol=1e-5, atol=1e-4 * math.sqrt(span))
    np.testing.assert_array_equal(x.grad.numpy() != 0, inside & (upstream.numpy() != 0))
    np.testing.assert_allclose(x.grad.numpy()[inside], upstream.numpy()[inside], rtol=1e-6)


@pytest.mark.parametrize("row", LEARNED.values(), ids=LEARNED.keys())
@pytest.mark.parametrize("shape", [(40, 30), (5, PIECE_ELEMENTS), (3 * PIECE_ELEMENTS + 17,)], ids=str)
@pytest.mark.parametrize("by_row", [False, True], ids=["one", "a row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_name)
def test_one_pass_in_pieces_gives_the_sums_of_the_formula(row, shape, by_row, dtype):
    """As computed in float64: within 2e-6 of the sum of what is added, and the gradient of x exactly."""
    grid, counts = grid_of(*row), (shape[0] if by_row else 1, *(1 for _ in shape[1:]))
    if by_row and len(shape) == 1:
        pytest.skip("no rows")
    span = grid.high - grid.low
    x = (randn(*shape) * 3).to(dtype).requires_grad_()
    scale = (torch.linspace(0.5, 1.5, counts[0]) * (8 / span)).view(counts).requires_grad_()
    zero = 6 if grid.scheme == "asymmetric" else grid.middle
    qparams = QParams(scale, torch.full(counts, zero, dtype=torch.int32), torch.full(counts, -2.0))
    upstream = randn(*shape, seed=1).to(dtype)
    fake_quantize(x, qparams, grid, fixed_zero=True).backward(upstream)

    shift = -2.0 if grid.formulation == "minval" else 0.0
    low, high = (0, span) if shift else (grid.low, grid.high)
    if not shift and not grid.format.is_float:
        low, high = grid.low - zero, grid.high - zero
    t = ((x.detach().float() - shift) / scale.detach()).double()
    rounded = t if grid.format.is_float else t.round()
    c = rounded.clamp(low, high)
    inside = c == rounded
    if grid.format.is_float:
        c = (c.float().to(torch.float8_e4m3fn)).double()
    by_element = torch.where(inside, c - t, c) * upstream.double()
    bound = 2e-6 * by_element.abs().sum_to_size(counts) + 1e-6 * span * upstream.double().abs().amax()
    assert 0.01 < inside.double().mean() < 1
    assert bool(((scale.grad - by_element.sum_to_size(counts)).abs() <= bound).all())
    assert torch.equal(x.grad, torch.where(inside, upstream, 0.0))


@pytest.mark.parametrize("size", [500, 4 * PIECE_ELEMENTS])
def test_the_gradient_of_a_learned_scale_can_be_differentiated_again(size):
    """The loss is L = sum y^2 / 2.

    dL/ds = sum y d, with d = dy/ds and dd/ds = t / s inside the range, so the second derivative is sum d^2 + y t / s.
    """
    grid = grid_of("int8", "symmetric")
    x, scale = (randn(size) * 3).requires_grad_(), torch.tensor(0.05, requires_grad=True)
    y = fake_quantize(x, QParams(scale, torch.tensor(0, dtype=torch.int32), None), grid)
    (slope,) = torch.autograd.grad(y.square().sum() / 2, scale, create_graph=True)
    (curve,) = torch.autograd.grad(slope, scale)

    t = x.detach().double() / 0.05
    inside = t.round() == t.round().clamp(-128, 127)
    d = torch.where(inside, t.round() - t, t.round().clamp(-128, 127))
    expected = d.square().sum() + (y.detach().double() * t * inside / 0.05).sum()
    torch.testing.assert_close(curve.double(), expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("row", LEARNED.values(), ids=LEARNED.keys())
def test_a_learned_scale_changes_no_value_and_sums_its_gradient_over_the_block(row):
    grid = grid_of(*row)
    x = randn(4, 50)
    qparams = clipping_qparams(x, grid, (1, 50))
    frozen = fake_quantize(x, qparams, grid, (1, 50))
    scale = qparams.scale.clone().requires_grad_()
    y = fake_quantize(x, qparams._replace(scale=scale), grid, (1, 50))
    assert is_bit_equal(y.detach(), frozen)
    y.sum().backward()
    expanded = qparams.map(lambda value: value.expand(4, 50))
    element_scale = expanded.scale.clone().requires_grad_()
    fake_quantize(x, expanded._replace(scale=element_scale), grid).sum().backward()
    assert scale.grad.shape == (4, 1)
    torch.testing.assert_close(scale.grad, element_scale.grad.sum(1, keepdim=True), rtol=1e-4, atol=1e-4)
