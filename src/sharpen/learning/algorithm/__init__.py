"""Pure maths of the algorithms: advantages, losses, KL, entropy, aggregation, and presets that combine them.

In and out: arrays (numpy for rewards and token weights, torch for tensors with gradient). No I/O, no state, no
knowledge of models, agents or records.
"""
