"""Where the parts of a run live: in one process with a serving thread (`local`), or in actors of Ray (`cluster`)."""
