#!/usr/bin/env bash
# The queued resource and its TPU VM; what lies in buckets stays.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

about='Delete a queued resource and its TPU VM, with everything on its disks. Nothing else stops the costs.'
required=(project zone name)
parse "$@"

queued_resource delete --force --quiet
