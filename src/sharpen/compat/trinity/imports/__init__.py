"""`import trinity` without Trinity-RFT: names of ours under the module names of theirs, for code that imports them.

- `stand_in`: the package `trinity`, made of our names: which module has which, and where ours are
- `functions`: small functions that examples import
"""
