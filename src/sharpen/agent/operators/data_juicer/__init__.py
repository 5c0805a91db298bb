"""Data-Juicer's operators, by its package where it is installed."""
