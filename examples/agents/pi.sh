#!/usr/bin/env bash
# pi 0.73.1: npm install @mariozechner/pi-coding-agent@0.73.1
# Chat completions (or openai-responses, or anthropic-messages as "api"). The base URL and the key go into models.json.
# Without supportsStore: false, pi sends store: false with every request, and the proxy trains nothing of it.
# Usage: pi.sh PROMPT [--continue] [further arguments of pi]
set -eu
prompt=$1
shift
# The agent compacts the conversation before the context is full, whose length the proxy knows.
context=$(curl -fsS -H "Authorization: Bearer $OPENAI_API_KEY" "$OPENAI_BASE_URL/models" |
  sed -n 's/.*"max_model_len":\([0-9]*\).*/\1/p')
mkdir -p "$HOME/.pi/agent"
cat > "$HOME/.pi/agent/models.json" <<MODELS
{"providers": {"areal": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "OPENAI_API_KEY", "api": "openai-completions",
  "models": [{"id": "policy", "contextWindow": ${CONTEXT_WINDOW:-${context:-32768}}, "maxTokens": 4096, "input": ["text"],
    "compat": {"supportsStore": false}}]}}}
MODELS
export PI_OFFLINE=1 PI_TELEMETRY=0
exec pi --print --provider areal --model policy "$@" "$prompt"
