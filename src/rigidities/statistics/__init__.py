"""What a fit learns from its data, summed up row by row.

`Statistics` has a field for each thing that is kept: the Gram and the products with the residuals
(`gram_sums`, with the `target_units`), the lowest hashes of rows and some rows
(`row_sketch`). It takes `block`s of rows in; a `Plan` says what is kept.
"""
