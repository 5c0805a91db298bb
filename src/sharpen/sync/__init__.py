"""When engines get a new policy version: a pure function of counters."""
