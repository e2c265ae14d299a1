#!/usr/bin/env bash
# The repository at a git ref, with its environment, in ~/dspark_jax of every worker.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

about='Install the repository at a git ref on all workers of a TPU VM; again to move to another ref.'
required=(project zone name repository ref)
parse "$@"

fetch=$(quote git fetch --depth 1 "${value[repository]}" "${value[ref]}")
on_workers all "git init dspark_jax && cd dspark_jax && $fetch && git checkout --detach FETCH_HEAD"
on_workers all dspark_jax/launch/worker_install.sh
