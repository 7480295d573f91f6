#!/usr/bin/env bash
# opencode 1.18.33: npm install opencode-ai@1.18.33
# Chat completions, through the AI SDK's openai-compatible provider. The base URL and the key go into its configuration.
# Usage: opencode.sh PROMPT [--continue] [further arguments of opencode run]
set -eu
prompt=$1
shift
export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1 OPENCODE_DISABLE_DEFAULT_PLUGINS=1
# The agent compacts the conversation before the context is full, whose length the proxy knows.
context=$(curl -fsS -H "Authorization: Bearer $OPENAI_API_KEY" "$OPENAI_BASE_URL/models" |
  sed -n 's/.*"max_model_len":\([0-9]*\).*/\1/p')
OPENCODE_CONFIG_CONTENT=$(cat <<CONFIG
{"autoupdate": false, "share": "disabled", "permission": "allow", "model": "areal/policy", "small_model": "areal/policy",
 "provider": {"areal": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
  "models": {"policy": {"tool_call": true, "attachment": true, "modalities": {"input": ["text", "image"], "output": ["text"]},
   "limit": {"context": ${CONTEXT_WINDOW:-${context:-32768}}, "output": 4096}}}}}}
CONFIG
)
export OPENCODE_CONFIG_CONTENT
exec opencode run "$@" "$prompt"
