#!/usr/bin/env bash
# Keeps a run going on capacity that is taken away: after every preemption a new slice, the same installation, the same
# command. It watches from outside the slice and holds no state: stop it and start it again at will.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

about='Watch a run that run.sh started; recreate the slice and continue while the exit status is 75 (interrupted).'
required=(project zone name accelerator-type runtime-version repository ref config data output)
optional=(spot env poll)
rest_is='further arguments of dspark_jax.train'
parse "$@"

INTERRUPTED=75 # EX_TEMPFAIL: what dspark_jax.train returns when SIGTERM ended it

statuses() { on_workers all 'cat dspark.status 2>/dev/null || echo running'; }

# Prints the exit status of the run once every worker has one, or the first failure. A slice that was taken away counts
# as interrupted; a question that got no answer (no network here, a worker that is booting) is asked again.
wait_for_exit() {
  local found answers
  while sleep "${value[poll]-60}"; do
    found=$(state) || continue
    case $found in
      SUSPENDING | SUSPENDED | FAILED) echo "$INTERRUPTED" && return ;;
      ACTIVE) answers=$(statuses) || continue ;;
      *) continue ;;
    esac
    answers=$(grep -xE 'running|[0-9]+' <<<"$answers" | sort -u)
    if grep -vxE "running|0|$INTERRUPTED" <<<"$answers" | head -n 1 | grep .; then return; fi
    case $answers in
      *running* | '') ;;
      *"$INTERRUPTED"*) echo "$INTERRUPTED" && return ;;
      *) echo 0 && return ;;
    esac
  done
}

# A new TPU VM needs a moment before it takes connections.
with_patience() {
  local attempt
  for attempt in 1 2 3 4 5; do
    if "$@"; then return; fi
    echo "attempt $attempt failed: $1 $2" >&2
    sleep "${value[poll]-60}"
  done
  return 1
}

restart() {
  local slice=(--project "${value[project]}" --zone "${value[zone]}" --name "${value[name]}") variable
  local variables=()
  for variable in "${environment[@]}"; do variables+=(--env "$variable"); done
  script delete.sh "${slice[@]}"
  script create.sh "${slice[@]}" --accelerator-type "${value[accelerator-type]}" \
    --runtime-version "${value[runtime-version]}" --poll "${value[poll]-60}" ${value[spot]:+--spot}
  with_patience script install.sh "${slice[@]}" --repository "${value[repository]}" --ref "${value[ref]}"
  local train=(--config "${value[config]}" --data "${value[data]}" --output "${value[output]}")
  if dry_run; then train+=(--dry-run); fi
  "$(dirname "${BASH_SOURCE[0]}")/run.sh" "${slice[@]}" "${train[@]}" "${variables[@]}" -- "${rest[@]}"
}

if dry_run; then
  state
  statuses
  restart
  exit 0
fi
while status=$(wait_for_exit) && [[ $status == "$INTERRUPTED" ]]; do
  echo "${value[name]}: interrupted, starting again" >&2
  restart
done
[[ $status == 0 ]] || echo "${value[name]}: training ended with status $status: see logs.sh" >&2
exit "$status"
