"""`import trinity` without Trinity-RFT: names of ours under the module names of theirs, for code that imports them."""
