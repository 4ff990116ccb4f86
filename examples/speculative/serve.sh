#!/usr/bin/env bash
# A server of one of four kinds:  serve.sh {plain|hisparse|speculative|both} MODEL [flags of sglang.launch_server]
#
# Environment: PORT (30000), DRAFT_TOKENS (3), TOP_K (2048, the model's index_topk).
set -euo pipefail
usage="usage: serve.sh {plain|hisparse|speculative|both} MODEL [flags]"
mode=${1:?$usage} model=${2:?$usage}
shift 2
draft_tokens=${DRAFT_TOKENS:-3} top_k=${TOP_K:-2048}

# the hot buffer holds all that the tokens of a verification can select, in whole pages
hot_buffer=$(((draft_tokens * top_k + 63) / 64 * 64))

flags=(--model-path "$model" --port "${PORT:-30000}" --page-size 64 --disable-radix-cache --enable-metrics)
hisparse=(
  --enable-hisparse
  --hisparse-config "{\"top_k\": $top_k, \"device_buffer_size\": $hot_buffer, \"host_to_device_ratio\": 2}"
)
speculative=(
  --speculative-algorithm EAGLE --speculative-eagle-topk 1
  --speculative-num-steps $((draft_tokens - 1)) --speculative-num-draft-tokens "$draft_tokens"
)

case $mode in
  plain) ;;
  hisparse) flags+=("${hisparse[@]}") ;;
  speculative) flags+=("${speculative[@]}") ;;
  both) flags+=("${hisparse[@]}" "${speculative[@]}") ;;
  *) echo "$usage" >&2; exit 2 ;;
esac
exec "${PYTHON:-python}" -m sglang.launch_server "${flags[@]}" "$@"
