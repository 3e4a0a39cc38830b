"""From residuals to ridge, scale, noise and law."""
