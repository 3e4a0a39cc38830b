"""Readers of the data sets: nothing is scaled, every file is checked, splits come as indices.

- `uci`: the regression sets of the PBP benchmark, with their published splits.
- `california`: California housing, with the rule of the out-of-domain study.
- `weather`: Rain in Australia, prepared as in the paper.
- `qm9`: molecules and their energies.

`files` says where they are looked for, `download` how they are got where they are not there,
`splits` how rows are divided.
"""
