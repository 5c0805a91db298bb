"""The embedded engine: continuous batching over plain torch and the Hugging Face model classes.

- `engine`: requests in, generations out; loads weights between two steps
- `stepper`: one step: place jobs, compute, sample, finish
- `scheduler`: which job has which slot: prefix reuse, eviction, suspension
- `slots`: the table of slots: ids, how many of them are computed, sampling state
- `batch`: the tokens of a step, laid out as rows
- `forward`: the forward pass: fused for some families, the model's own modules for all others
- `projections`: its linear layers: fused, with adapters beside
- `beside`: adapters by name, rows of different ones in one step
- `attention`: attention of a step over the slots
- `products`: a layer's attention by plain batched products, and its rule
- `kv`: the keys and values of all slots, within a budget
- `mixing`: recurrent and convolution layers over the slots
- `states`: their states, and copies where other jobs may begin
- `pictures`: the images of jobs
- `prompt_scores`: the logprobs of a prompt's own tokens, where a request asks for them
- `sampling`: draws tokens, with the exact logprobs that they were drawn with
- `graphs`: CUDA graphs for steps that only decode
- `matmul`: the faster of two ways to a matrix product on a CPU
- `selfcheck`: compares our forward pass with the model's own at start
"""
