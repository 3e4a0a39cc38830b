"""What users hand in, and what is written to files.

`feed` turns data into batches on the model's device, with `batches`, `arrays` and `shards` behind
it; `samples` are data for several passes. `slots` name one input of a batch. `output_layout` says
how outputs belong to rows, `sketch` recognises rows by their hashes, and `finiteness` explains
predictions that are not finite.
`storage` writes and reads files.
"""
