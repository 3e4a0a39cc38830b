"""Tomorrow's maximum temperature with error bars, over Australia (paper, Sec. 4.4)."""
