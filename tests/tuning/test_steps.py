"""Each step lowers the objective of its formula on correlated inputs, and handles singular, dead and tiny inputs."""

from dataclasses import replace

import pytest
import torch

from scalepoint.numerics import get_format
from scalepoint.tuning.code_grids import CodeGrid
from scalepoint.tuning.moments import MomentSums
from scalepoint.tuning.problem import LayerProblem, Solution
from scalepoint.tuning.steps import find_step


def make_moments(weight, count=2000, noise=0.05, seed=0, dead=False, rank=None):
    generator = torch.Generator().manual_seed(seed)
    groups, _, size = weight.shape
    mix = torch.randn(groups, rank or size, size, generator=torch.Generator().manual_seed(9))
    exact = torch.einsum("rgk,gkn->rgn", torch.randn(count, groups, rank or size, generator=generator), mix) + 1.0
    if dead:
        exact[..., 0] = 0.0
    noisy = exact * 0.97 + noise * exact.std() * torch.randn(exact.shape, generator=generator)
    if dead:
        noisy[..., 0] = 0.0
    sums = MomentSums()
    sums.add(noisy, torch.einsum("rgn,gon->rgo", exact, weight.float()))
    return sums.to_moments()


def make_problem(groups=2, outputs=6, size=12, bits=4, blocks=1, **options):
    torch.manual_seed(3)
    weight = torch.randn(groups, outputs, size, dtype=torch.float64)
    high = 2 ** (bits - 1) - 1
    scale = weight.abs().reshape(groups, outputs, blocks, -1).amax(-1) / high
    ends = torch.full((1, 1, 1), float(high), dtype=torch.float64)
    fit, judge = make_moments(weight, **options), make_moments(weight, **{**options, "seed": 1})
    problem = LayerProblem("layer", weight, CodeGrid(-ends, ends), fit, judge, True, True)
    return problem, Solution(weight, problem.nearest_codes(weight, scale), scale)


CASES = {
    "plain": {},
    "depthwise": {"groups": 16, "outputs": 1, "size": 9},
    "one input": {"size": 1},
    "blocks": {"size": 32, "blocks": 4},
    "three bits": {"bits": 3},
    "two bits": {"bits": 2},
    "few rows": {"count": 8},
    "dead input": {"dead": True},
    "singular": {"rank": 3, "noise": 0.0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["target", "scale", "gptq", "descend"])
def test_codes_are_integers_within_the_range(case, name):
    problem, start = make_problem(**CASES[case])
    result = find_step(name).run(problem, start)
    assert torch.equal(result.codes, result.codes.round())
    assert float(result.codes.abs().max()) <= float(problem.grid.high.max())
    assert bool(result.scale.isfinite().all())
    assert bool((result.scale > 0).all())
    again = find_step(name).run(problem, start)
    assert torch.equal(result.codes, again.codes)


@pytest.mark.parametrize("case", ["plain", "depthwise", "blocks", "three bits", "singular"])
@pytest.mark.parametrize("name", ["gptq", "descend"])
def test_rounding_beats_the_nearest_codes(case, name):
    problem, start = make_problem(**CASES[case])
    result = find_step(name).run(problem, start)
    assert problem.error(result, problem.fit) < problem.error(start, problem.fit)
    assert problem.error(result) < problem.error(start)


def objective(problem, solution):
    apart = solution.values - solution.target
    return float(torch.einsum("gon,gnm,gom->", apart, problem.damped_hessian().double(), apart))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_are_rounded_like_torch_round_with_ties_to_even(dtype):
    ends = torch.full((1, 1, 1), 255.0)
    values = torch.cat([torch.arange(-1024, 1024) / 8, torch.randn(10_000) * 60, torch.tensor([0.49999997, -255.0])])
    values = values.to(dtype).clamp(-255, 255)
    assert torch.equal(CodeGrid(-ends, ends).round_(values.clone()), values.round())


def test_only_the_factor_of_the_best_ridge_is_cached():
    problem, start = make_problem()
    find_step("target").run(problem, start)
    assert sum(isinstance(key, tuple) for key in problem.fit.cache) <= 1


def test_descent_never_raises_its_own_objective():
    problem, start = make_problem(size=24)
    rounded = find_step("gptq").run(problem, start)
    result = find_step("descend").run(problem, rounded)
    assert objective(problem, result) <= objective(problem, rounded) * (1 + 1e-5)


def test_the_target_corrects_the_error_of_the_quantized_inputs():
    problem, start = make_problem()
    result = find_step("target").run(problem, start)
    before = float(problem.holdout.error(problem.weight).sum())
    assert float(problem.holdout.error(result.target).sum()) < 0.8 * before
    assert isinstance(problem.notes["ridge"], float)


def test_with_too_few_rows_the_target_is_unchanged():
    problem, start = make_problem(count=8)
    assert find_step("target").run(problem, start).target is start.target
    assert "fewer than two rows" in problem.notes["ridge"]


def test_a_given_ridge_is_used():
    problem, start = make_problem()
    results = [find_step("target").run(replace(problem, ridge=ridge), start).target for ridge in (0.0, 1e9)]
    torch.testing.assert_close(results[1], problem.weight, rtol=1e-6, atol=1e-6)
    assert float((results[0] - problem.weight).abs().max()) > 0.01


def test_without_held_out_rows_the_ridge_grows_with_the_unknowns():
    problem, start = make_problem(count=40)
    problem = replace(problem, holdout=problem.fit)
    find_step("target").run(problem, start)
    assert problem.notes["ridge"] == pytest.approx(0.3 + 2 * 12 / 40)


@pytest.mark.parametrize("name", ["scale", "gptq", "descend"])
@pytest.mark.parametrize("channels", [4, 3], ids=["even", "odd"])
def test_codes_respect_the_limit_on_pairs(name, channels):
    problem, start = make_problem(groups=1, size=channels * 4, bits=8)
    along = torch.arange(channels * 4).view(4, channels).T.reshape(-1)
    partner = along.view(-1, 2).flip(1).reshape(-1)
    partners = torch.empty_like(partner).scatter_(0, along, partner)[None]
    problem = replace(problem, grid=replace(problem.grid, partners=partners))
    start = Solution(problem.weight, problem.nearest_codes(problem.weight, start.scale), start.scale)
    result = find_step(name).run(problem, start)
    other = result.codes[..., partners[0]]
    sums = torch.where(result.codes.sign() == other.sign(), result.codes.abs() + other.abs(), 0)
    assert float(sums.max()) <= 128
    assert float(result.codes.abs().max()) > 64  # the rule binds: no scale was made larger for it


def test_codes_of_a_float_format_are_values_of_the_format():
    problem, start = make_problem()
    grid = CodeGrid(torch.tensor(-448.0), torch.tensor(448.0), get_format(torch.float8_e4m3fn))
    scale = start.scale / 64
    problem = replace(problem, grid=grid)
    start = Solution(problem.weight, problem.nearest_codes(problem.weight, scale), scale)
    for name in ("gptq", "descend"):
        result = find_step(name).run(problem, start)
        stored = result.codes.to(torch.float32).to(torch.float8_e4m3fn).to(torch.float64)
        assert torch.equal(stored, result.codes)
        assert objective(problem, result) < objective(problem, start)


def test_if_no_damping_helps_the_codes_are_unchanged():
    problem, start = make_problem()
    problem.fit.hessian.fill_(float("nan"))
    assert find_step("gptq").run(problem, start) is start
    assert "left to descent" in problem.notes["damping"]
