#!/bin/sh
# The share of digits in the answer: a reward between 0 and 1.
answer=0
if [ -s /app/answer.txt ]; then
  answer=$(tr -d '\n' < /app/answer.txt | awk '{ all = length($0); digits = gsub(/[0-9]/, ""); print all ? digits / all : 0 }')
fi
echo "${answer:-0}" > /logs/verifier/reward.txt
