"""What model families there are, what each needs, and which part of Sharpen has it.

In: a model's folder. Out: its modules, tokenizer, images, adapters, experts, and what is refused by name. It must not
know of requests, rollouts or training.

- `table`: one row for each family: what it needs, and who has it
- `pieces`: what a model needs beside plain attention
- `support`: what each family can do here, for people
- `files`: the files of a model on this machine
- `configuration`: reads a model's configuration and tokenizer, never its code
- `identity`: the digest by which a run knows a model again
- `modules`: loads a whole model, and finds its text decoder and its towers
- `checkpoint`: writes it as it came, but for the tensors that were trained
- `blockwise`: attention of a block of queries over a block of keys, forward and backward
- `windows`: shortens windows and chunks for the checks at start
- `recurrent`: recurrent and convolution layers, run from any state
- `experts`: the weights of experts, and computing with adapted ones
- `routing`: records which experts are chosen, and has them chosen again
- `balance`: the loss that spreads tokens over experts
- `adapters`: puts LoRA adapters into a model
- `adapter_files`: reads adapters to be served by name, and checks that they fit
- `nf4`: a frozen layer kept in 4 bits
- `frozen`: loads a model for adapters, layer by layer where its layers will be in 4 bits
- `images`: an image as tokens of a prompt and as pixels for a tower
- `marks`: where images lie among the tokens of a sequence
- `sight`: shows images to a model during a pass
- `stand_ins`: towers that are never loaded
"""
