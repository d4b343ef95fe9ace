#!/usr/bin/env bash
# Replace the end of a new train.sh by the launch of train.py, as its owner would in an editor.
set -euo pipefail
file=${1:?which train.sh}
kept=$(grep -v -e 'no training command yet' -e '^exit 1$' -- "$file")
{
  printf '%s\n' "$kept"
  # shellcheck disable=SC2016 # the variables belong to the job, not to this script
  printf '%s\n' \
    '# This image has no tuneplane wheel: take the reporting module that travels with the run.' \
    'export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"' \
    'echo "node $TUNEPLANE_MACHINE_RANK of $TUNEPLANE_MACHINE_COUNT, node 0 is at $TUNEPLANE_MAIN_PROCESS_IP"' \
    'exec python3 "$TUNEPLANE_EXP_DIR/train.py"'
} > "$file.new"
cat -- "$file.new" > "$file"
rm -- "$file.new"
