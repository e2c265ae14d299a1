#!/usr/bin/env bash
# The same on a GKE cluster through xpk: `xpk.sh ACTION`, one action after another.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ACTIONS='create-cluster, attach-bucket, submit, logs, delete, delete-cluster'
action=${1-}
case $action in
  create-cluster)
    about='Create a GKE cluster with one slice, able to show buckets as folders.'
    required=(project zone cluster tpu-type)
    optional=(spot)
    ;;
  attach-bucket)
    about='Show a bucket as /gcs/NAME to workloads that are submitted with it.'
    required=(project zone cluster bucket)
    ;;
  submit)
    about='Train from the working tree; restarts after preemption. gs:// arguments must lie in the attached --bucket.'
    required=(project zone cluster tpu-type workload bucket config data output)
    optional=(env max-restarts)
    rest_is='further arguments of dspark_jax.train'
    ;;
  logs)
    about='Follow the log of a workload.'
    required=(project zone cluster workload)
    optional=(lines)
    ;;
  delete)
    about='Stop a workload and remove it; the cluster stays, and costs.'
    required=(project zone cluster workload)
    ;;
  delete-cluster)
    about='Delete the cluster with all of its slices. Buckets stay.'
    required=(project zone cluster)
    ;;
  -h | --help)
    printf 'Train on GKE through xpk.\n\nusage: xpk.sh ACTION [option ...]\n\nactions: %s\n' "$ACTIONS"
    echo 'xpk.sh ACTION --help shows the options of one.'
    exit 0
    ;;
  '') die "ACTION is missing, one of: $ACTIONS" ;;
  *) die "unknown action $(quote "$action"), expected one of: $ACTIONS" ;;
esac
# shellcheck disable=SC2034 # read by usage
usage_name="xpk.sh $action"
shift
parse "$@"
place
at=("--cluster=${value[cluster]}" "${place[@]}")

# gs://BUCKET/PATH as containers see it.
mounted() {
  local inside="gs://${value[bucket]}/"
  case $1 in
    "$inside"*) printf '/gcs/%s/%s' "${value[bucket]}" "${1#"$inside"}" ;;
    gs://*) die "$(quote "$1") does not lie in --bucket ${value[bucket]}" ;;
    *) printf '%s' "$1" ;;
  esac
}

submit() {
  local train=(python -m dspark_jax.train --processes.coordinator auto --config "${value[config]}")
  local argument path variable
  local flags=()
  for argument in --data "${value[data]}" --output "${value[output]}" "${rest[@]}"; do
    path=$(mounted "$argument")
    train+=("$path")
  done
  for variable in "${environment[@]}"; do flags+=("--env=$variable"); done
  # 75 is what dspark_jax.train returns when SIGTERM ended it: save within the grace period, then start again. xpk
  # signals one process, and `exec` makes that the training itself.
  execute xpk workload create "${at[@]}" "--workload=${value[workload]}" "--tpu-type=${value[tpu-type]}" \
    "--storage=${value[bucket]}" --base-docker-image=python:3.12 --script-dir=. \
    "--max-restarts=${value[max-restarts]-100}" --restart-on-exit-codes=75 --termination-grace-period-seconds=300 \
    "${flags[@]}" "--command=pip install --quiet -e . 'jax[tpu]' && exec $(quote "${train[@]}")"
}

case $action in
  create-cluster)
    capacity=--on-demand
    if [[ -n ${value[spot]-} ]]; then capacity=--spot; fi
    execute xpk cluster create "${at[@]}" "--tpu-type=${value[tpu-type]}" --num-slices=1 "$capacity" \
      --enable-workload-identity --enable-gcsfuse-csi-driver
    ;;
  attach-bucket)
    execute xpk storage attach "${value[bucket]}" "${at[@]}" --type=gcsfuse "--bucket=${value[bucket]}" --size=1 \
      "--mount-point=/gcs/${value[bucket]}" --readonly=false --auto-mount=false
    ;;
  submit) submit ;;
  logs)
    execute gcloud container clusters get-credentials "${value[cluster]}" "--project=${value[project]}" \
      "--location=${value[zone]%-*}"
    execute kubectl logs --follow --prefix "--tail=${value[lines]-100}" --max-log-requests=100 \
      "--selector=jobset.sigs.k8s.io/jobset-name=${value[workload]}"
    ;;
  delete) execute xpk workload delete "${at[@]}" "--workload=${value[workload]}" --force ;;
  delete-cluster) execute xpk cluster delete "${at[@]}" --force ;;
esac
