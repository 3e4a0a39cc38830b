"""What users hand in, and what is written to files.

`sources` are arrays, data sets and loaders, as raw batches; `batches` are these on the model's
device, and `samples` are data for several passes. `slots` name one input of a batch.
`output_layout` says how outputs belong to rows, `hashes` recognise rows and weights, and
`finiteness` explains predictions that are not finite.
`storage` writes and reads files.
"""
