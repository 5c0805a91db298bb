#!/bin/bash
if cmp /app/notes.md /tests/notes.txt && [ ! -e /app/notes.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
