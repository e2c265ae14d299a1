#!/usr/bin/env bash
# Runs on a worker, started by run.sh: mounts the buckets it is told of, trains, leaves log and exit status.
#
# Every argument gs://BUCKET/PATH, and such a DSPARK_CACHE, becomes a path under ~/gcs/BUCKET, where gcsfuse shows the
# bucket. What is printed goes to ~/dspark.log; ~/dspark.status appears when the run ends and holds its exit status.
set -euo pipefail
exec >>"$HOME/dspark.log" 2>&1
trap 'echo $? >"$HOME/dspark.status"' EXIT
# At a shutdown this script is signalled too: it must outlive the training process, which saves a checkpoint.
trap : TERM
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Puts the path that shows gs://BUCKET/PATH, mounted where it is not yet, into `path`; other text stays as it is.
mounted() {
  path=$1
  if [[ $path == gs://* ]]; then
    path=${path#gs://}
    local folder=$HOME/gcs/${path%%/*}
    if ! mountpoint -q "$folder"; then
      mkdir -p "$folder"
      gcsfuse --implicit-dirs "${path%%/*}" "$folder"
    fi
    path=$HOME/gcs/$path
  fi
}

arguments=()
for argument in "$@"; do
  mounted "$argument"
  arguments+=("$path")
done
if [[ -n ${DSPARK_CACHE-} ]]; then
  mounted "$DSPARK_CACHE"
  export DSPARK_CACHE=$path
fi

# The workers of a slice find each other.
PYTHONUNBUFFERED=1 .venv/bin/python -m dspark_jax.train --processes.coordinator auto "${arguments[@]}"
