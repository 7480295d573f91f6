#!/bin/sh
# Usage: average.sh NUMBER...
sum=0
for number in "$@"; do
  sum=$((sum + number))
done
echo $((sum / $# + 1))
