#!/usr/bin/env bash
# make.sh CLONE PYTHON: make the fixtures with the code of CLONE, in a directory that contains only
# corpus.jsonl and study.yaml.
set -euo pipefail
CLONE=$1 PYTHON=$2
export PYTHONPATH=$CLONE OMP_NUM_THREADS=1 TORCHINDUCTOR_CACHE_DIR=inductor
noted=("$PYTHON" "$CLONE/tests/integration/planted_train.py" none 0 0) # train.py that logs samples
data=(data=files 'data.paths=[corpus.jsonl]' data.cache_dir=cache data.vocab_size=300
  data.num_workers=0 data.heldout_fraction=0.1 wandb.mode=disabled run.report=false)
small=(model.vocab_size=300 model.dim=4 model.n_layers=1 model.n_heads=2 model.n_kv_heads=1
  model.head_dim=4 model.ffn_dim=8 precision=fp32 global_batch_size=4 optim.warmup_steps=2
  eval.interval=2 eval.sequences=4 eval.tokens=300)
run=("${data[@]}" model=tiny attention=diff_v2 "${small[@]}" seq_len=32 steps=12 log_interval=2
  diagnostics.interval=2 diagnostics.probe_interval=4 checkpoint.interval=4)
ranks=("${data[@]}" model=moe_tiny attention=diff_v2 "${small[@]}" model.moe.n_experts=4
  model.moe.expert_dim=8 seq_len=32 data.packing=best_fit data.mask_documents=true steps=6
  log_interval=3 checkpoint.interval=50)
sweep=("${data[@]}" model=tiny "${small[@]}" seq_len=128 global_batch_size=2 steps=4 log_interval=2
  diagnostics.interval=4 checkpoint.interval=4 model.n_heads=5 model.match_params_to=diff_v2)

# stopped NAME STEP RANKS WORD...: train outputs/NAME until SIGTERM arrives in this step.
stopped() {
  local gate=outputs/$1/gate-$2 pids=()
  mkdir -p "outputs/$1" && touch "$gate"
  for ((rank = 0; rank < $3; rank++)); do
    (($3 == 1)) || export RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$3 MASTER_ADDR=127.0.0.1 \
      MASTER_PORT=29512
    SAMPLES=. "${noted[@]}" "${@:4}" "run.dir=outputs/$1" & pids+=($!)
  done
  until grep -q reached "$gate"; do sleep 0.1; done
  kill -TERM "${pids[0]}" && sleep 1 && rm "$gate"
  for pid in "${pids[@]}"; do wait "$pid" || [ $? = 143 ]; done
  unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
  rm samples-*.jsonl
}

# whole NAME WORD...: the same run on one rank without a stop; only its samples and summary stay.
whole() {
  SAMPLES=. "${noted[@]}" "${@:2}" run.dir=whole
  mkdir -p expected
  mv samples-0.jsonl "expected/$1.jsonl"
  mv whole/summary.json "expected/$1.json"
  rm -r whole
}

stopped run 6 1 "${run[@]}"
whole run "${run[@]}"
stopped ranks 3 2 "${ranks[@]}" parallel.expert=2
whole ranks "${ranks[@]}"
"$PYTHON" "$CLONE/train.py" -m "${sweep[@]}" attention=standard,diff_v2 seed=0,1 run.sweep=sweep
tool=("$PYTHON" -m diffllm)
"${tool[@]}" evaluate run=outputs/sweep tasks=[mqar,phonebook] limit=4
"${tool[@]}" evaluate run=outputs/sweep suite=checkpoint limit=4
"${tool[@]}" study run study.yaml out=outputs/study
"${tool[@]}" study verdict study.yaml out=outputs/study --json > expected/verdict.json
"${tool[@]}" export run=outputs/run out=exported
"${tool[@]}" outliers run=outputs/run --json > expected/outliers.json
"${tool[@]}" generate run=outputs/run prompt="Document 3: 3 times" temperature=0 max_new_tokens=12 \
  > expected/generated.txt

rm -rf outputs/{sweep/standard*,sweep/*seed1,study/*seed*,study/rates/*}/checkpoints
rm -rf outputs/sweep/report.html outputs/study/verdict.html exported/modeling_diffllm.py inductor
find . -name '.*.verified' -delete
find cache outputs -type f -exec grep -lIE "$CLONE|$PYTHON|$PWD|$HOSTNAME" {} + | xargs sed -i -E "
  s#$PYTHON#python#g; s#$CLONE/##g; s#$PWD#/data#g; s# on $HOSTNAME:# on host:#
  s#\"(host)\": \"$HOSTNAME\"#\"\1\": \"host\"#; s#\"(platform)\": \"[^\"]*\"#\"\1\": \"Linux\"#"
mv outputs runs
