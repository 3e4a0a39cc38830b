"""The user's model, untouched: running and differentiating it.

`calling` runs a model and picks its prediction; `shadow` copies it without copying its weights;
`changes` notices that the original has changed. `derivatives` differentiates, under every mode of
torch with `modes` and `threads`. `double`, `mean_of` and `plain_copy` turn models into a form
that can be used.
"""
