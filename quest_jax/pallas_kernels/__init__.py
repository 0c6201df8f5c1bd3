"""The ops: arrays in, arrays out. One folder an op, one file per implementation."""
