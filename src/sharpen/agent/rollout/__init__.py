"""Runs a workflow and a judge on `Task`s; returns groups of scored `Rollout`s, with failures classified by cause."""
