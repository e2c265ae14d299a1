#!/usr/bin/env bash
# The training log, as it grows.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

about='Follow the log of a training run; Ctrl-C stops following, not training.'
required=(project zone name)
optional=(worker lines)
parse "$@"

on_workers "${value[worker]-0}" "tail -n ${value[lines]-100} -F dspark.log"
