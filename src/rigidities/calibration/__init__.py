"""From residuals to ridge, scale, noise and distribution."""
