"""Each step lowers what its formula says, from correlated inputs, and survives what is singular, dead or tiny."""

import pytest
import torch

from scalepoint.tuning.moments import Sums
from scalepoint.tuning.problem import Problem, Solution
from scalepoint.tuning.steps import find_step


def seen(weight, count=2000, noise=0.05, seed=0, dead=False, rank=None):
    generator = torch.Generator().manual_seed(seed)
    groups, _, size = weight.shape
    mix = torch.randn(groups, rank or size, size, generator=torch.Generator().manual_seed(9))
    exact = torch.einsum("rgk,gkn->rgn", torch.randn(count, groups, rank or size, generator=generator), mix) + 1.0
    if dead:
        exact[..., 0] = 0.0
    noisy = exact * 0.97 + noise * exact.std() * torch.randn(exact.shape, generator=generator)
    if dead:
        noisy[..., 0] = 0.0
    sums = Sums(weight)
    sums.add(exact, noisy)
    return sums.moments()


def made(groups=2, outputs=6, size=12, bits=4, blocks=1, **options):
    torch.manual_seed(3)
    weight = torch.randn(groups, outputs, size, dtype=torch.float64)
    high = 2 ** (bits - 1) - 1
    scale = weight.abs().reshape(groups, outputs, blocks, -1).amax(-1) / high
    ends = torch.full((1, 1, 1), float(high), dtype=torch.float64)
    fit, judge = seen(weight, **options), seen(weight, **{**options, "seed": 1})
    problem = Problem("layer", weight, -ends, ends, fit, judge, True, True)
    return problem, Solution(weight, problem.nearest(weight, scale), scale)


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
def test_codes_stay_whole_and_in_range(case, name):
    problem, start = made(**CASES[case])
    found = find_step(name)(problem, start)
    assert torch.equal(found.codes, found.codes.round())
    assert float(found.codes.abs().max()) <= float(problem.high.max())
    assert bool(found.scale.isfinite().all())
    assert bool((found.scale > 0).all())
    again = find_step(name)(problem, start)
    assert torch.equal(found.codes, again.codes)


@pytest.mark.parametrize("case", ["plain", "depthwise", "blocks", "three bits", "singular"])
@pytest.mark.parametrize("name", ["gptq", "descend"])
def test_rounding_beats_the_nearest_codes(case, name):
    problem, start = made(**CASES[case])
    found = find_step(name)(problem, start)
    assert problem.error(found, problem.fit) < problem.error(start, problem.fit)
    assert problem.error(found) < problem.error(start)


def test_descent_never_raises_its_own_objective():
    problem, start = made(size=24)
    hessian = problem.damped()

    def objective(solution):
        apart = solution.values - solution.target
        return float(torch.einsum("gon,gnm,gom->", apart, hessian, apart))

    found = find_step("descend")(problem, find_step("gptq")(problem, start))
    assert objective(found) <= objective(find_step("gptq")(problem, start)) * (1 + 1e-5)


def test_the_target_makes_good_what_the_quantized_inputs_lack():
    problem, start = made()
    found = find_step("target")(problem, start)
    before = float(problem.judge.error(problem.weight, problem.weight).sum())
    assert float(problem.judge.error(problem.weight, found.target).sum()) < 0.8 * before
    assert isinstance(problem.notes["ridge"], float)


def test_too_few_rows_leave_the_target():
    problem, start = made(count=8)
    assert find_step("target")(problem, start).target is start.target
    assert "fewer than two rows" in problem.notes["ridge"]


def test_where_no_damping_helps_the_codes_are_left_to_descent():
    problem, start = made()
    problem.fit.noisy.fill_(float("nan"))
    assert find_step("gptq")(problem, start) is start
    assert "left to descent" in problem.notes["damping"]
