"""Supervised training: fine-tuning (`sft`), continued pre-training (`cpt`), preference pairs (`dpo`)."""
