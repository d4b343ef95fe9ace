#!/usr/bin/env bash
# The first run, as docs/first-run.md tells it: demo.sh PROFILE [--image FILE].
# Works in a new folder: $DEMO_DIR where set, else below the temporary folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
profile=${1:?which profile: local:2, h200:16}
shift
folder=${DEMO_DIR:-$(mktemp -d "${TMPDIR:-/tmp}/tuneplane-demo.XXXXXX")}
mkdir -p -- "$folder"
cd -- "$folder"
echo "the demo's lab is made in $folder"

say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

say tp init my-lab
cd my-lab
say tp new ring --method custom/custom
# What its owner writes: the trainer, and the end of train.sh.
cp -- "$here/train.py" experiments/ring/train.py
"$here/edit-train-sh.sh" experiments/ring/train.sh
say git add -A
say git -c user.name=You -c user.email=you@example.org commit -q -m "First experiment"
say tp validate ring --profile "$profile" "$@" --observability-url https://tracker.example.org/ring
say tp submit ring --profile "$profile" "$@" --observability-url https://tracker.example.org/ring \
  --set lr=1.0 --set steps=300 --follow
say tp job metrics ring train/loss
say tp job artifacts ring
say tp job ls
