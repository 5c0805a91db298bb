"""Metrics in; TensorBoard, JSONL, W&B or MLflow, the reward curve and the summary out."""
