"""Trinity-RFT's further built-in workflows, by the kind of task that they are for. `registry` has their names."""
