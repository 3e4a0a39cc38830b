"""The full model of `criterion="auto"`: from left-out and validation rows to noise, tails and tilt.

Data flow: `target_rows` makes one table of rows for each target; `target_fit` fits the
model to it, by `scale_fit` (noise, scale and tails) and `tilt_fit` (shape); `ladder` compares it on
left-out rows with simpler models; `automatic` turns the one that is taken into a report.
"""
