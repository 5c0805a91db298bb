"""What the pages show: typed, plain records, made by pure functions from a run's files and its index. No HTML."""
