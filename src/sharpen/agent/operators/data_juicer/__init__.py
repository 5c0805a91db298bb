"""Data-Juicer's operators, by its package where it is installed.

- `rows`: loads them, and applies them to tasks and to rollouts
"""
