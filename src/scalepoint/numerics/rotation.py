"""Rotations that spread outliers over all channels.

    R = U H D       H: a Hadamard matrix over sqrt(n), D: random signs; |R_ij| = 1 / sqrt(n), nobody keeps an outlier
                    U: the reflection that takes H D 1 to 1, where the mean must stay (layer norm): then R 1 = 1

Hadamard matrices are there for n = 2^k m with m = 1, q + 1 (Paley, q = 3 mod 4) or 2 (q + 1) (q = 1 mod 4), q a prime;
for other n, H is a random orthogonal matrix. All in float64, and the same for the same seed.
"""

import torch
from torch import Tensor


def make_rotation(size: int, seed: int = 0, *, keeps_mean: bool = False) -> Tensor:
    """An orthogonal matrix (size, size)."""
    generator = torch.Generator().manual_seed(seed)
    base: Tensor | None = make_hadamard(size)
    if base is None:
        drawn = torch.randn(size, size, dtype=torch.float64, generator=generator)
        base, upper = torch.linalg.qr(drawn)
        base = base * upper.diagonal().sign()
    else:
        base = base / size**0.5
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    turned: Tensor = base * signs
    if not keeps_mean:
        return turned
    off = turned.sum(1) - 1
    if float(off.norm()) < 1e-9:
        return turned
    off = off / off.norm()
    mirrored: Tensor = turned - 2 * torch.outer(off, off @ turned)
    return mirrored


def make_hadamard(size: int) -> Tensor | None:
    """A matrix of +1 and -1 with orthogonal rows, or None where no construction here gives one."""
    core, factor = size, 1
    while core > 0:
        core_matrix = _make_core(core)
        if core_matrix is not None:
            return torch.kron(_make_sylvester(factor), core_matrix)
        if core % 2:
            return None
        core, factor = core // 2, factor * 2
    return None


def _make_sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def _make_core(size: int) -> Tensor | None:
    if size in (1, 2):
        return _make_sylvester(size)
    if size % 4 == 0 and _is_prime(size - 1) and (size - 1) % 4 == 3:
        return _make_paley(size - 1)
    if size % 4 == 0 and _is_prime(size // 2 - 1) and (size // 2 - 1) % 4 == 1:
        return _make_paley_doubled(size // 2 - 1)
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % each for each in range(2, int(number**0.5) + 1))


def _make_jacobsthal(q: int) -> Tensor:
    """Jacobsthal's matrix: +1 where i - j is a square modulo q, -1 where it is none, 0 on the diagonal."""
    squares = {each * each % q for each in range(1, q)}
    row = torch.tensor([0.0 if not k else 1.0 if k in squares else -1.0 for k in range(q)], dtype=torch.float64)
    places = torch.arange(q)
    return row[(places[:, None] - places[None, :]) % q]


def _add_border(q: int, sign: float) -> Tensor:
    whole = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    whole[0, 1:], whole[1:, 0], whole[1:, 1:] = 1.0, sign, _make_jacobsthal(q)
    return whole


def _make_paley(q: int) -> Tensor:
    return _add_border(q, -1.0) + torch.eye(q + 1, dtype=torch.float64)


def _make_paley_doubled(q: int) -> Tensor:
    one, zero = [[1.0, 1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]]
    on, off = torch.tensor(one, dtype=torch.float64), torch.tensor(zero, dtype=torch.float64)
    return torch.kron(_add_border(q, 1.0), on) + torch.kron(torch.eye(q + 1, dtype=torch.float64), off)
