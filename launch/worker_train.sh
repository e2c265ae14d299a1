#!/usr/bin/env bash
# Runs on a worker, started by run.sh: mounts the buckets it is told of, trains, leaves log and exit status.
#
# Every argument gs://BUCKET/PATH becomes a path under ~/gcs/BUCKET, where gcsfuse shows the bucket. The output goes to
# ~/dspark.log; ~/dspark.status appears when the run ends and holds its exit status.
set -euo pipefail
exec >>"$HOME/dspark.log" 2>&1
trap 'echo $? >"$HOME/dspark.status"' EXIT
# At a shutdown this script is signalled too: it must outlive the training process, which saves a checkpoint.
trap : TERM
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arguments=()
for argument in "$@"; do
  if [[ $argument == gs://* ]]; then
    path=${argument#gs://}
    bucket=${path%%/*}
    if ! mountpoint -q "$HOME/gcs/$bucket"; then
      mkdir -p "$HOME/gcs/$bucket"
      gcsfuse --implicit-dirs "$bucket" "$HOME/gcs/$bucket"
    fi
    argument=$HOME/gcs/$path
  fi
  arguments+=("$argument")
done

# The workers of a slice find each other.
PYTHONUNBUFFERED=1 .venv/bin/python -m dspark_jax.train --processes.coordinator auto "${arguments[@]}"
