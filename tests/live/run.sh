#!/usr/bin/env bash
# The cases of cases.py on a real cluster, as the ordinary user who calls this, by `tp` on the PATH.
#
#   tests/live/run.sh PROFILE IMAGE [CASE…]      for example: run.sh h200-pyxis:1 ~/trainer.sqsh
#
# PROFILE's container runtime is what is tested. IMAGE (.sqsh, or .sif for Apptainer) needs bash and Python 3; a
# copy of it with an environment of its own is made first, in a folder below the home (or below $LIVE_FOLDER,
# which nodes must see). Runs, labs and that folder are removed where all went well.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
profile=${1:?which profile}
image=$(readlink -f "${2:?which image}")
shift 2

folder=$(mktemp -d "${LIVE_FOLDER:-$HOME}/tuneplane-live-XXXXXX")
variables=$(PYTHONPATH=$here python3 -c 'from cases import HOSTILE_IMAGE as e; print(*(f"{k}={v}" for k, v in e.items()), sep="\n")')
hostile=$folder/hostile.sqsh
offset=0
case $image in
  *.sif) offset=$(apptainer sif list "$image" | sed -n 's/.*|\([0-9]*\)-[0-9]* *|FS .*/\1/p') ;;
esac
unsquashfs -quiet -no-progress -no-xattrs -offset "$offset" -dest "$folder/root" "$image" >"$folder/log" 2>&1 ||
  [[ -x $folder/root/bin/sh ]] # device files, which ordinary users cannot make
printf '%s\n' "$variables" >>"$folder/root/etc/environment"
if [[ -d $folder/root/.singularity.d/env ]]; then
  printf '%s\n' "$variables" | sed 's/.*/export &/' >"$folder/root/.singularity.d/env/95-live.sh"
fi
mksquashfs "$folder/root" "$hostile" -quiet -no-progress -all-root -comp gzip >>"$folder/log"
chmod -R u+w "$folder/root"
rm -rf "$folder/root"
python3 "$here/run.py" "$profile" "$hostile" "$folder" "$@"
rm -rf "$folder"
