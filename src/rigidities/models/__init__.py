"""The user's model, untouched: running and differentiating it."""
