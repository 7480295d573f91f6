#!/bin/sh
echo 1234567890 > answer.txt
