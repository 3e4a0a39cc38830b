"""What error bars hold outside the domain of the training."""
