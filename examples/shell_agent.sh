#!/bin/sh
# A one-turn agent without Python. The last line is the reward: the share of characters that are digits.
set -eu
question=$(sed 's/.*"question": *"\([^"]*\)".*/\1/' "$AREAL_PROBLEM")
answer=$(curl --silent --show-error --fail --noproxy '*' "$OPENAI_BASE_URL/chat/completions" \
  --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
  --data "{\"model\": \"policy\", \"max_tokens\": 12, \"messages\": [{\"role\": \"user\", \"content\": \"$question\"}]}")
text=$(printf '%s\n' "$answer" | sed -n 's/.*"content": *"\(\([^"\\]\|\\.\)*\)".*/\1/p')
printf '%s\n' "$text" | awk '{ all += length($0); digits += gsub(/[0-9]/, "") } END { print all ? digits / all : 0 }'
