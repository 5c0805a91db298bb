"""Pure maths of the algorithms: advantages, losses, KL, entropy, aggregation, and presets that combine them.

In: numbers (numpy for a group's rewards and a batch's token weights, torch for what carries gradient). Out: numbers.
No I/O, no state, no knowledge of models, agents or records.
"""
