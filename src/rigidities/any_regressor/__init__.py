"""Error bars of any differentiable regressor: the façade `PredictionRigidity` and its parts."""
