#!/usr/bin/env bash
# Qwen Code 0.24.4: npm install @qwen-code/qwen-code@0.24.4
# Chat completions. It reads OPENAI_BASE_URL (with /v1) and OPENAI_API_KEY.
# Usage: qwen_code.sh PROMPT [--continue] [further arguments of qwen]
set -eu
prompt=$1
shift
mkdir -p "$HOME/.qwen"
echo '{"telemetry": {"enabled": false}, "privacy": {"usageStatisticsEnabled": false},
  "memory": {"enableManagedAutoMemory": false}, "general": {"disableAutoUpdate": true, "disableUpdateNag": true, "enableAutoUpdate": false}}' > "$HOME/.qwen/settings.json"
export QWEN_CODE_NO_RELAUNCH=true # it would start itself again with more memory for interactive use
exec qwen "$@" --auth-type openai --model policy --yolo --chat-recording --prompt "$prompt"
