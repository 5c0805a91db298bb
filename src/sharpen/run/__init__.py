"""A run: `decide` settles it, `plan` predicts it, `assembly` builds it, `loop` trains it step by step from a source of
batches, `outcome` writes the results.

In: a configuration and the user's functions. Out: a run directory with a better model, or none, and the proof. It must
not know of the command line, nor of servers around it.
"""
