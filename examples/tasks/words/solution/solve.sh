#!/bin/sh
grep -o -i -w actor /app/data/text.txt | wc -l | tr -d ' ' > /app/count.txt
