#!/usr/bin/env bash
# Train with one process per GPU, on one node or on several nodes (launch/README.md):
#   launch/torchrun.sh [overrides]
#   NNODES=2 RDZV_ENDPOINT=node1:29400 launch/torchrun.sh [overrides]     the same on every node
# Works in any directory, with the repository's environment active. Relative paths start in the
# current directory. The script forwards signals to the training processes, which save and exit;
# torchrun alone would kill the processes after 30 seconds, or would not stop them.
# RUN_DIR=... sets the run directory; then exit status 75 means that the run stopped and can resume.
set -m # Give torchrun a separate process group, so that Ctrl-C reaches only this script.

fail() { echo "error: $1" >&2; exit 2; }
command -v torchrun >/dev/null ||
  fail "torchrun is not in PATH; activate the repository's environment: source .venv/bin/activate"

if [[ ${NNODES:-1} == 1 ]]; then
  meet=(--standalone)
else
  [[ ${RDZV_ENDPOINT:-} ]] ||
    fail "NNODES=$NNODES needs RDZV_ENDPOINT=HOST:PORT, the address of one of the nodes"
  # A dead node is detected after 3 x 5 seconds; then the remaining nodes wait 10 seconds for it.
  meet=(--nnodes="$NNODES" --rdzv-backend=c10d --rdzv-id="${RDZV_ID:-diffllm}"
    --rdzv-endpoint="$RDZV_ENDPOINT"
    "--rdzv-conf=join_timeout=1800,last_call_timeout=10"
    ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"})
  # Rank 0 may move to another node after a restart: the ranks must not reuse the first address.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi

torchrun "${meet[@]}" --nproc-per-node="${NPROC_PER_NODE:-auto}" \
  --max-restarts="${MAX_RESTARTS:-0}" -m diffllm train ${RUN_DIR:+"run.dir=$RUN_DIR"} "$@" &
agent=$!

forward() { # Send the signal to the workers, or SIGTERM to torchrun if it has no workers yet.
  local workers
  read -ra workers < <(cat "/proc/$agent/task/"*/children)
  if ((${#workers[@]})); then kill -s "$1" "${workers[@]}"; else kill -s TERM "$agent"; fi
}
trap 'forward TERM' TERM
trap 'forward USR1' USR1
trap 'interrupted=1; forward INT' INT

while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done # A signal interrupts `wait`.
wait "$agent"
code=$?
# After Ctrl-C the workers save and exit with 0, because torchrun would report any other status as
# a failure and could restart them.
[[ $code == 0 && ${interrupted:-} ]] && code=130
[[ $code == 0 && -n ${RUN_DIR:-} && -e $RUN_DIR/requeue ]] && code=75
exit "$code"
