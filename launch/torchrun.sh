#!/usr/bin/env bash
# Train with one process a GPU, on this node or as one of several (launch/README.md):
#   launch/torchrun.sh [overrides]
#   NNODES=2 RDZV_ENDPOINT=node1:29400 launch/torchrun.sh [overrides]     the same on every node
# Started from the repository, in its environment. A signal goes on to the training processes, which
# save and end; torchrun itself would kill them after 30 seconds, or leave them behind.
# RUN_DIR=... names the run; then the exit status is 75 if it was stopped and wants to go on.
set -m # torchrun gets a process group of its own: a terminal's Ctrl-C comes through here, too

if [[ ${NNODES:-1} == 1 ]]; then
  meet=(--standalone)
else
  # A dead node is missed after 3 x 5 seconds; the others wait 10 more for it to come back.
  meet=(--nnodes="$NNODES" --rdzv-backend=c10d --rdzv-id="${RDZV_ID:-diffllm}"
    --rdzv-endpoint="${RDZV_ENDPOINT:?the address of one of the nodes, host:port}"
    "--rdzv-conf=join_timeout=1800,last_call_timeout=10"
    ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"})
  # Rank 0 may move to another node: the ranks have to meet anew, not where it was at first.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi

torchrun "${meet[@]}" --nproc-per-node="${NPROC_PER_NODE:-auto}" \
  --max-restarts="${MAX_RESTARTS:-0}" train.py ${RUN_DIR:+"run.dir=$RUN_DIR"} "$@" &
agent=$!

forward() { # to the workers, or as SIGTERM to torchrun while it has none
  local workers
  read -ra workers < <(cat "/proc/$agent/task/"*/children)
  if ((${#workers[@]})); then kill -s "$1" "${workers[@]}"; else kill -s TERM "$agent"; fi
}
trap 'forward TERM' TERM
trap 'forward USR1' USR1
trap 'forward INT' INT

while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done # a signal ends `wait`
wait "$agent"
code=$?
[[ $code == 0 && -n ${RUN_DIR:-} && -e $RUN_DIR/requeue ]] && code=75
exit "$code"
