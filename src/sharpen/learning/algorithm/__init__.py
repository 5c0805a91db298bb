"""Pure maths of the algorithms: advantages, losses, KL, entropy, aggregation, and presets that combine them.

In and out: arrays (numpy for rewards and token weights, torch for tensors with gradient). No I/O, no state, no
knowledge of models, agents or records.

- `presets`: the published algorithms by name: where to begin
- `resolve`: one of them with a run's settings
- `parts`: what an advantage, a loss, a KL, an aggregation is, also one of your own
- `returns`: the rewards of a step, as all advantages are computed from
- `shaping`: rewards of over-long answers, and which rollouts take part
- `advantages`: an advantage for each call, from rewards
- `role_baseline`: baselines of roles, which move from step to step
- `token_baseline`: what each token of a group is compared with, for the least variance
- `gae`: an advantage for each token, from a critic's values
- `losses`: the loss of each token
- `second_moment`: which tokens M2PO trains
- `sequence_mask`: which calls lose the tokens with a negative advantage
- `behaviour`: weights for tokens that older weights sampled
- `kl`: estimators of the divergence from a reference
- `clip_entropy`: which tokens lose their advantage, so that entropy stays
- `aggregation`: from losses of tokens to that of an update
- `objective`: all of it for a micro-batch, with its metrics
- `distill`: learning from a teacher's logprobs
- `expert`: learning from an expert's rows beside rollouts
- `supervised`: learning from rows alone: `sft`, `cpt`, `dpo`
"""
