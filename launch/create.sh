#!/usr/bin/env bash
# Queued resource -> TPU VM, ready for install.sh.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

about='Ask for a TPU slice by a queued resource and wait until it is there.'
required=(project zone name accelerator-type runtime-version)
optional=(spot poll)
parse "$@"

queued_resource create "--node-id=${value[name]}" "--accelerator-type=${value[accelerator-type]}" \
  "--runtime-version=${value[runtime-version]}" ${value[spot]:+--spot}
if dry_run; then
  state
  exit 0
fi
while :; do
  found=$(state)
  case $found in
    ACTIVE) exit 0 ;;
    FAILED | SUSPENDED) die "the queued resource is $found: see gcloud's describe, then delete.sh" ;;
  esac
  printf '%s: %s\n' "${value[name]}" "$found" >&2
  sleep "${value[poll]-60}"
done
