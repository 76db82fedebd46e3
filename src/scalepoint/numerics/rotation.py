"""Rotations that spread outliers over all channels, for the migration "rotate".

    R = U H D       H: a Hadamard matrix / sqrt(n), D: random signs. |R_ij| = 1 / sqrt(n), so outliers are spread evenly
                    U: identity, or, where the mean must be kept (layer norm), the reflection of H D 1 to 1: R 1 = 1

Hadamard matrices exist here for n = 2^k m with m = 1, q + 1 (Paley, q = 3 mod 4) or 2 (q + 1) (q = 1 mod 4), q a prime.
For other n, H is a random orthogonal matrix. Computed in float64, the same for the same seed.
"""

import torch
from torch import Tensor


def make_rotation(size: int, seed: int = 0, *, keeps_mean: bool = False) -> Tensor:
    """Return an orthogonal matrix (size, size). With `keeps_mean` it maps the vector of ones to itself."""
    generator = torch.Generator().manual_seed(seed)
    base: Tensor | None = make_hadamard(size)
    if base is None:
        random = torch.randn(size, size, dtype=torch.float64, generator=generator)
        base, upper = torch.linalg.qr(random)
        base = base * upper.diagonal().sign()
    else:
        base = base / size**0.5
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    rotation: Tensor = base * signs
    if not keeps_mean:
        return rotation
    normal = rotation.sum(1) - 1
    if float(normal.norm()) < 1e-9:
        return rotation
    normal = normal / normal.norm()
    reflected: Tensor = rotation - 2 * torch.outer(normal, normal @ rotation)
    return reflected


def make_hadamard(size: int) -> Tensor | None:
    """Return a matrix of +1 and -1 with orthogonal rows; None if no construction is known here for this size."""
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
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _make_jacobsthal(q: int) -> Tensor:
    """Return Jacobsthal's matrix: +1 where i - j is a square modulo q, -1 where it is not, 0 on the diagonal."""
    squares = {number * number % q for number in range(1, q)}
    row = torch.tensor([0.0, *(1.0 if number in squares else -1.0 for number in range(1, q))], dtype=torch.float64)
    index = torch.arange(q)
    return row[(index[:, None] - index[None, :]) % q]


def _add_border(q: int, sign: float) -> Tensor:
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = sign
    matrix[1:, 1:] = _make_jacobsthal(q)
    return matrix


def _make_paley(q: int) -> Tensor:
    return _add_border(q, -1.0) + torch.eye(q + 1, dtype=torch.float64)


def _make_paley_doubled(q: int) -> Tensor:
    off_diagonal = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    identity = torch.eye(q + 1, dtype=torch.float64)
    return torch.kron(_add_border(q, 1.0), off_diagonal) + torch.kron(identity, diagonal)
