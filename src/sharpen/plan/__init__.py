"""Before it starts: what memory and time a run will take, and what to change where it does not fit."""
