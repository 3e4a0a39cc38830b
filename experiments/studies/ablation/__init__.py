"""What each part of the default error bars brings, in and outside the domain of the training."""
