"""Finding a model's readout, and reading its features.

`find` turns a model and its first batch into a `Readout`, which the `readout` module defines: a
frozen value that turns every further batch into a `Reading`. `search` finds the heads in the
autograd graph, `linearity` tells which other layers belong to them, `checks` judge the features.
`unregistered` refuses parameters that no model knows. `heads` and `columns` say what the weights of
a readout are, `tail` takes the derivatives of what follows them and makes the `reading`. `copies`
read inside compiled and exported graphs.
"""
