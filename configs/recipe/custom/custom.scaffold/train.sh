#!/usr/bin/env bash
set -euo pipefail
# TunePlane runs this once on every node: bash "$TUNEPLANE_EXP_DIR/train.sh"
# The working folder is TUNEPLANE_WORK_DIR, the root of the lab's copy, not this file's folder.
# What lies under TUNEPLANE_OUT_DIR outlives the job (checkpoints/, logs/, hf_export/, eval/report.json).

# A variable of the job that is missing stops the script here, not hours later.
: "${TUNEPLANE_WORK_DIR:?is missing: TunePlane sets it in a job, start it with tp submit}"
: "${TUNEPLANE_EXP_DIR:?is missing: TunePlane sets it in a job, start it with tp submit}"
: "${TUNEPLANE_OUT_DIR:?is missing: TunePlane sets it in a job, start it with tp submit}"
: "${TUNEPLANE_FRAMEWORK:?is missing: TunePlane sets it in a job, start it with tp submit}"
: "${TUNEPLANE_RECIPE:?is missing: TunePlane sets it in a job, start it with tp submit}"
: "${TUNEPLANE_CLUSTER_NUM_NODES:?is missing: TunePlane sets it in a job, start it with tp submit}"
: "${TUNEPLANE_CLUSTER_GPUS_PER_NODE:?is missing: TunePlane sets it in a job, start it with tp submit}"
: "${TUNEPLANE_JOB_ENABLED:?is missing: TunePlane sets it in a job, start it with tp submit}"
if [ "$TUNEPLANE_JOB_ENABLED" = 1 ]; then
  : "${TUNEPLANE_JOB_ENDPOINT:?is missing though reporting is on: start it with tp submit}"
  : "${TUNEPLANE_JOB_RUN_ID:?is missing though reporting is on: start it with tp submit}"
  : "${TUNEPLANE_JOB_TOKEN:?is missing though reporting is on: start it with tp submit}"
fi

# Launch lines. Take the # off one of them, or write your own, in place of the last two lines.
# exec lets the trainer itself receive the signals that ask it to save and end.
#
# One node, plain python, one process:
# exec python3 "$TUNEPLANE_EXP_DIR/train.py"
#
# One node, accelerate (on CPUs it starts one process, whatever the number: take torchrun there):
# exec accelerate launch --num_machines 1 --num_processes "$TUNEPLANE_CLUSTER_GPUS_PER_NODE" "$TUNEPLANE_EXP_DIR/train.py"
#
# One node, torchrun:
# exec torchrun --standalone --nproc_per_node "$TUNEPLANE_CLUSTER_GPUS_PER_NODE" "$TUNEPLANE_EXP_DIR/train.py"
#
# Several nodes, plain python, one process on each (torch.distributed reads these five):
# export MASTER_ADDR="$TUNEPLANE_MAIN_PROCESS_IP" MASTER_PORT="$TUNEPLANE_MAIN_PROCESS_PORT"
# export WORLD_SIZE="$TUNEPLANE_MACHINE_COUNT" RANK="$TUNEPLANE_MACHINE_RANK" LOCAL_RANK=0
# exec python3 "$TUNEPLANE_EXP_DIR/train.py"
#
# Several nodes, accelerate:
# exec accelerate launch --multi_gpu \
#   --num_machines "$TUNEPLANE_MACHINE_COUNT" --machine_rank "$TUNEPLANE_MACHINE_RANK" \
#   --main_process_ip "$TUNEPLANE_MAIN_PROCESS_IP" --main_process_port "$TUNEPLANE_MAIN_PROCESS_PORT" \
#   --num_processes "$((TUNEPLANE_CLUSTER_NUM_NODES * TUNEPLANE_CLUSTER_GPUS_PER_NODE))" \
#   "$TUNEPLANE_EXP_DIR/train.py"
#
# Several nodes, torchrun:
# exec torchrun --nnodes "$TUNEPLANE_CLUSTER_NUM_NODES" --node_rank "$TUNEPLANE_MACHINE_RANK" \
#   --master_addr "$TUNEPLANE_MAIN_PROCESS_IP" --master_port "$TUNEPLANE_MAIN_PROCESS_PORT" \
#   --nproc_per_node "$TUNEPLANE_CLUSTER_GPUS_PER_NODE" "$TUNEPLANE_EXP_DIR/train.py"

echo "no training command yet" >&2
exit 1
