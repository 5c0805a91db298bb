#!/bin/bash
# Half for a file, the rest for the right sum; `written` becomes a metric.
written=0; reward=0
if [ -s /app/total.txt ]; then written=1; reward=0.5; fi
if [ "$(tr -d '[:space:]' < /app/total.txt)" = 30 ]; then reward=1; fi
echo "{\"reward\": $reward, \"written\": $written}" > /logs/verifier/reward.json
