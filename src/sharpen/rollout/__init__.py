"""`Task`s, a workflow and a judge in; groups of scored `Rollout`s out, failures classified by cause."""
