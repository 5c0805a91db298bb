"""The vLLM engine, which has its own processes and weight-transfer protocol.

- `engine`: requests in, generations out
- `start`: starts vLLM with the settings that our promises need
- `loading`: new weights into a running vLLM, by the way that works here
- `transfer`: the way on one GPU: handles to its memory
- `broadcast`: the way between GPUs: NCCL
- `worker`: what runs in vLLM's workers: receives weights
- `adapters`: LoRA adapters, one name for each version
- `pictures`: the images of requests
- `experts`: workers return the experts of every token
- `scheduler`: vLLM's scheduler, so that it returns experts without a GPU
- `encoder_cache`: vLLM's cache of images, where prompts are not computed in parts
"""
