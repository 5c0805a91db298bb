"""Updates made a second time, with nothing of the trainer's: from a run's records, sequence by sequence.

- `retrain`: repeats the updates between two checkpoints, and compares every weight
- `beside`: the same in a process beside a run
- `steps`: what each step trained: the calls, advantages and weights of tokens
- `rows`: the same of a run on rows, by the code that made their sequences
- `update`: the plain loop
- `begin`: a step, and what is known before its first update
- `implied`: the gradient that a moved weight implies, where moments are in 8 bits
- `model`: a forward pass by transformers alone, with the recorded experts and images
- `blocks`: a model too large to be held whole, read from its files a block at a time
- `loss_rules`: the loss that the settings require
- `losses`: the losses of tokens
- `credit`: advantages of tokens, and which tokens their entropy leaves out
- `balance`: the balance loss of experts
- `teacher`: a teacher's part
- `reread`: a call as a teacher with other tokens reads it
- `optimizers`: AdamW and Muon, with rate and clip
- `quantized`: numbers in 4 and 8 bits
- `saved_state`: what a checkpoint holds of the trainer
"""
