"""Supervised training: fine-tuning (`sft`), continued pre-training (`cpt`), preference pairs (`dpo`).

- `data`: the datasets of such a run, and what makes lessons of them
- `rows`: a row as conversation, text or pair
- `lessons`: these as token sequences, as an agent would see them
- `batches`: lessons as the batches of a step
- `held_out`: the loss on rows that are not trained
- `checks`: the certificate of such a step
"""
