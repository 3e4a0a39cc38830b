"""The user's model, untouched: running and differentiating it.

`calling` runs a model and picks its prediction; `shadow` copies it without copying its weights, and
watches the original. `modes`, `directional` and `threads` are for derivatives under every mode of
torch. `double`, `mean_of`, `plain_copy` and `keras_model` turn models into a form that can be used.
"""
