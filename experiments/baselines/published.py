"""The benchmark's table as the paper prints it: quoted, not computed here.

Bigi, Chong, Ceriotti and Grasselli, "A prediction rigidity formalism for low-cost uncertainties in
trained neural networks", 2024, Table 2. Its first three columns are quoted there from the works
that introduced the methods; the fourth is the paper's own. Two decimals, as printed.
"""

from __future__ import annotations

Value = tuple[float, float | None]
"""A mean and its printed standard error, None where the table has N/A."""

METHODS = ("pbp", "mc_dropout", "deep_ensemble", "llpr")

ERROR_DIVISOR = 5
"""The paper's script divides standard deviations by the root of this, for any number of splits."""

SPLITS = {"protein": 5, "year": 1}
"""Numbers of splits that the table states, where they are not 20."""

ROUNDING = 0.01
"""The step of the printed numbers."""

# A line: RMSE of PBP, MC dropout, deep ensemble, LLPR; then NLL of the same.
_TABLE = """
concrete  5.67±0.09  5.23±0.12  6.03±0.13  5.26±0.25   3.16±0.02  3.04±0.02  3.06±0.04  3.09±0.07
energy    1.80±0.05  1.66±0.04  2.09±0.06  0.49±0.03   2.04±0.02  1.99±0.02  1.38±0.05  0.69±0.07
kin8nm    0.10±0.00  0.10±0.00  0.09±0.00  0.08±0.00  -0.90±0.01 -0.95±0.01 -1.20±0.00 -1.12±0.01
naval     0.01±0.00  0.01±0.00  0.00±0.00  0.00±0.00  -3.73±0.01 -3.80±0.01 -5.63±0.01 -7.07±0.08
power     4.12±0.03  4.02±0.04  4.11±0.04  3.94±0.07   2.84±0.01  2.80±0.01  2.79±0.01  2.83±0.02
protein   4.73±0.01  4.36±0.02  4.71±0.03  4.18±0.02   2.97±0.00  2.89±0.00  2.83±0.01  2.91±0.01
wine      0.64±0.01  0.62±0.01  0.64±0.01  0.63±0.02   0.97±0.01  0.93±0.01  0.94±0.03  1.02±0.03
yacht     1.02±0.05  1.11±0.08  1.58±0.11  1.19±0.16   1.63±0.02  1.55±0.03  1.18±0.05  1.58±0.20
year      8.88±N/A   8.86±N/A   8.89±N/A   8.91±N/A    3.60±N/A   3.59±N/A   3.35±N/A   3.61±N/A
"""


def _value(cell: str) -> Value:
    """A cell such as "5.67±0.09" as numbers."""
    mean, error = cell.split("±")
    return float(mean), None if error == "N/A" else float(error)


def _methods(cells: list[str]) -> dict[str, dict[str, Value]]:
    """RMSE and NLL of each method, from the cells of a line."""
    values = [_value(cell) for cell in cells]
    rmse_values = values[: len(METHODS)]
    nll_values = values[len(METHODS) :]
    return {
        method: {"rmse": rmse, "nll": nll}
        for method, rmse, nll in zip(METHODS, rmse_values, nll_values, strict=True)
    }


def _parsed_table() -> dict[str, dict[str, dict[str, Value]]]:
    """The lines of the table by the name of the set."""
    table = {}
    for line in _TABLE.strip().splitlines():
        name, *cells = line.split()
        table[name] = _methods(cells)
    return table


TABLE = _parsed_table()
"""TABLE[set][method]["rmse" or "nll"] is a `Value`."""
