"""Readers of the data sets: nothing is scaled, every file is checked, splits come as indices.

- `uci`: the regression sets of the PBP benchmark, with their published splits.
- `california`: California housing, with the rule of the out-of-domain study.
- `weather`: Rain in Australia, prepared as in the paper.
- `qm9`: molecules and their energies.
- `cosine`: noisy points of a known function.

`files` says where they are looked for, `download` how a set is fetched that is not there, and
`splits` how rows are divided. `benchmark`, `outside` and `domains` make the stacked tensors that
networks are trained on.
"""
