"""Metrics in; TensorBoard, JSONL, W&B, MLflow or SwanLab, the reward curve and the summary out."""
