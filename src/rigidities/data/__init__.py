"""What users hand in, and what is written to files.

`feed` turns data into batches on the model's device, with `batches`, `arrays`, `shards` and
`parquet` behind it; `samples` are data for several passes. `slots` name one input of a batch.
`sketch` knows rows again by hashes, `finiteness` explains predictions that are not finite.
`storage` writes and reads files, as the table in `schema` says.
"""
