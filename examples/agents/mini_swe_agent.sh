#!/usr/bin/env bash
# mini-swe-agent 2.4.6: pip install mini-swe-agent==2.4.6 mcp==2.3.0
# Chat completions, through LiteLLM, which reads OPENAI_BASE_URL (with /v1) and OPENAI_API_KEY.
# Usage: mini_swe_agent.sh PROMPT [further arguments of mini]
set -eu
prompt=$1
shift
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
exec mini --yolo --exit-immediately --cost-limit 0 --model openai/policy --task "$prompt" "$@" < /dev/null
