"""Trinity-RFT's configuration files: what each key becomes here. `conversion` is where to begin."""
