"""Token ids in, sampled ids out: the engine interface and our own continuous-batching engine."""
