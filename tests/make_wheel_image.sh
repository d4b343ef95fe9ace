#!/usr/bin/env bash
# An image with this project's wheel, made by an ordinary user on the testbed from one without it.
#   make_wheel_image.sh IMAGE SITE_PACKAGES TARGET
set -euo pipefail
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
mkdir "$work/rootfs"
# What only root may read there is nothing that a trainer needs.
apptainer --quiet exec --contain --no-mount hostfs,cwd,tmp,home "$1" \
  tar -c --one-file-system --anchored --exclude='./.[a-z]*' --exclude=./proc --exclude=./sys --exclude=./dev \
  --exclude=./root --exclude=./singularity --exclude=./environment --ignore-failed-read -C / . |
  tar -x --no-same-owner -C "$work/rootfs"
mkdir "$work"/rootfs/{proc,sys,dev,root}
cp -r "$2"/tuneplane "$2"/tuneplane-*.dist-info "$work/rootfs/usr/lib/python3/dist-packages/"
printf 'Bootstrap: localimage\nFrom: %s\n' "$work/rootfs" >"$work/image.def"
apptainer --quiet build --mksquashfs-args '-comp gzip -Xcompression-level 1' "$3" "$work/image.def"
