#!/usr/bin/env bash
# Cline CLI 3.0.65: npm install cline@3.0.65
# Chat completions, through its provider openai-compatible. The base URL and the key go into its providers.json.
# Usage: cline.sh PROMPT [further arguments of cline]
set -eu
prompt=$1
shift
cline auth openai-compatible --baseurl "$OPENAI_BASE_URL" --apikey "$OPENAI_API_KEY" --modelid policy > /dev/null
exec cline --provider openai-compatible --model policy "$@" "$prompt"
