#!/bin/sh
python3 -I /tests/grade.py
