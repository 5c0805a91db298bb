"""The configuration of a run: YAML and keyword arguments, resolved into one validated, immutable object.

In: files, the command line, arguments, what they point to (functions, rows). Out: `RunConfig`, with where each value
comes from. It must not know of any room that reads it.
"""
