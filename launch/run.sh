#!/usr/bin/env bash
# The training command in a tmux session of every worker: it goes on when ssh drops.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

about='Start a training run on all workers, in the background; the same command continues an interrupted run.'
required=(project zone name config data output)
optional=(env)
rest_is='further arguments of dspark_jax.train'
parse "$@"

train=(launch/worker_train.sh --config "${value[config]}" --data "${value[data]}" --output "${value[output]}")
train=(env "${environment[@]}" "${train[@]}" "${rest[@]}")
on_workers all "cd dspark_jax && rm -f ../dspark.status && tmux new-session -d -s dspark $(quote "${train[@]}")"
