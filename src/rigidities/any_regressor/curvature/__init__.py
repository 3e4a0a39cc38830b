"""The curvature of the loss by the parameters, summed over the data and solved."""
