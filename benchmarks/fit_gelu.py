"""Where the constants of the native pair gate's gelu come from (pair_gate.h), and how good they are.

    python benchmarks/fit_gelu.py

gelu(z) = (z + |z| (1 - N)) / 2 with N(|z|) = 1 - tanh(u). The eighth root of N is fitted on [0, 5.2] by a
polynomial of degree 6, in the minimax sense (Lawson's iteration), each point weighted by what an error
there does to gelu and, five times less, to its slope. A scaled argument makes the leading coefficient 1, and
Knuth's adaptation of coefficients turns the polynomial into three products and seven sums.
"""

import numpy as np

LIMIT, DEGREE, SLOPE_WEIGHT = 5.2, 6, 0.2
LINEAR, CUBIC = np.sqrt(2 / np.pi), np.sqrt(2 / np.pi) * 0.044715
Array = np.ndarray


def tail(a: Array) -> Array:
    """N"""
    return 2 / (1 + np.exp(2 * (LINEAR * a + CUBIC * a**3)))


def fit() -> Array:
    """Coefficients of the root's polynomial, constant first."""
    a = (1 - np.cos(np.linspace(0, np.pi, 6000))) / 2 * LIMIT
    n, steep = tail(a), LINEAR + 3 * CUBIC * a * a
    root = n ** (1 / 8)
    of_value, of_slope = a / 2, np.abs(a * steep * (1 - n) - 0.5)
    weight = 8 * root**7 * np.maximum(of_value, SLOPE_WEIGHT * of_slope) + 1e-9
    basis = np.polynomial.chebyshev.chebvander(2 * a / LIMIT - 1, DEGREE)
    trust, best = np.ones_like(a), (np.inf, np.zeros(DEGREE + 1))
    for _ in range(1000):
        w = np.sqrt(trust) * weight
        coefficients = np.linalg.lstsq(basis * w[:, None], root * w, rcond=None)[0]
        error = np.abs(basis @ coefficients - root) * weight
        best = min(best, (error.max(), coefficients), key=lambda pair: pair[0])
        trust *= error / error.max() + 1e-3
        trust /= trust.max()
    chebyshev = np.polynomial.chebyshev.Chebyshev(best[1], domain=[0, LIMIT])
    return chebyshev.convert(kind=np.polynomial.Polynomial).coef


def adapt(u: Array) -> Array:
    """Knuth's six constants of a monic polynomial of degree 6, built on a real root of a cubic."""
    b1 = (u[5] - 1) / 2
    b2 = u[4] - b1 * (b1 + 1)
    b3, b4 = u[3] - b1 * b2, b1 - b2
    b5 = u[2] - b1 * b3
    roots = np.roots([2, 2 * b4 - b2 + 1, 2 * b5 - b2 * b4 - b3, u[1] - b2 * b5])
    b6 = roots[np.abs(roots.imag).argmin()].real
    b7 = b6**2 + b4 * b6 + b5
    b8 = b3 - b6 - b7
    a0 = b2 - 2 * b6
    a2 = b1 - a0
    a1 = b6 - a0 * a2
    return np.array([a0, a1, a2, b7 - a1 * a2, b8 - b7 - a1, u[0] - b7 * b8])


def errors(unit: float, constants: Array) -> tuple[float, float]:
    """The greatest errors of gelu and of its slope, in the kernel's steps in single precision."""
    f = np.float32
    a0, a1, a2, a3, a4, a5 = constants.astype(f)
    cube = 3 * CUBIC / unit**3
    x = (np.linspace(0, 8, 1 << 20) * unit).astype(f)
    a = np.minimum(x, f(LIMIT * unit))
    square = (a + a0) * a + a1
    third = (a + a2) * square + a3
    n = (third + square + a4) * third + a5
    n = n * n
    n = n * n
    n = n * n
    tanh = 1 - n
    value = x * tanh
    slope = f(1 / cube) - n * f(1 / cube) + (a * a + f(LINEAR / unit / cube)) * a * (1 - tanh * tanh)
    z = x.astype(float) / unit
    true = 1 - tail(z)
    true_slope = true + z * (LINEAR + 3 * CUBIC * z * z) * (1 - true**2)
    of_value = np.abs(value / unit - z * true).max() / 2
    return float(of_value), float(np.abs(slope * cube - true_slope).max() / 2)


def main() -> None:
    polynomial = fit()
    unit = polynomial[DEGREE] ** (1 / DEGREE)
    constants = adapt(polynomial / unit ** np.arange(DEGREE + 1))
    cube = 3 * CUBIC / unit**3
    print(f"UNIT {unit:.10g}  LIMIT {LIMIT} UNIT  CUBE {cube:.10g}  LINE {LINEAR / unit / cube:.10g}")
    print("A0 to A5 ", "  ".join(f"{c:.10g}" for c in constants))
    print("errors of gelu and its slope: {:.1e}, {:.1e}".format(*errors(unit, constants)))


if __name__ == "__main__":
    main()
