"""Training without rollouts: fine-tuning on conversations (`sft`), further pre-training (`cpt`), pairs (`dpo`)."""
