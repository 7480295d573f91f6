#!/bin/bash
# Half of the reward for each of two cases.
passed=0
[ "$(sh /app/average.sh 1 2 3)" = 2 ] && passed=$((passed + 1))
[ "$(sh /app/average.sh 10)" = 10 ] && passed=$((passed + 1))
awk "BEGIN { print $passed / 2 }" > /logs/verifier/reward.txt
