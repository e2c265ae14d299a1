# shellcheck shell=bash
# Sourced by the scripts beside it: options, help, checks, quoting, and the gcloud commands they share.
#
# A script sets `about`, `required`, `optional` and calls `parse "$@"`; after that `${value[name]}` holds what was
# given, `environment` every --env, `rest` what followed `--`. Commands go through `execute`, which only prints them
# under --dry-run.

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "${0##*/}: bash 4.4 or newer is needed, this is $BASH_VERSION (macOS: brew install bash)" >&2
  exit 2
fi

about=''
required=()
optional=()
rest_is=''  # what may follow `--`; empty where nothing may
declare -A value=()
environment=()
rest=()

die() {
  printf '%s: %s\n' "${0##*/}" "$1" >&2
  exit 2
}

# Sets placeholder (empty for switches), pattern and text of an option.
describe() {
  local word='[a-z]([a-z0-9-]*[a-z0-9])?' printable='[^[:cntrl:]]+'
  case $1 in
    project) placeholder=ID pattern='[a-z][a-z0-9.:-]*[a-z0-9]' text='Google Cloud project' ;;
    zone) placeholder=ZONE pattern='[a-z]+-[a-z0-9]+-[a-z0-9]+' text='zone, such as us-east5-b' ;;
    name) placeholder=NAME pattern=$word text='of the queued resource and its TPU VM: a-z, 0-9, hyphens' ;;
    accelerator-type) placeholder=TYPE pattern='[a-z0-9]+-[0-9]+' text='slice, such as v6e-8' ;;
    runtime-version) placeholder=VERSION pattern='[a-z0-9][a-z0-9.-]*' text='TPU software, such as v2-alpha-tpuv6e' ;;
    spot) placeholder='' text='cheaper capacity that may be taken away at any time' ;;
    repository) placeholder=URL pattern='(https|ssh)://[A-Za-z0-9._~:/@%+-]+' text='git URL that the workers can read' ;;
    ref) placeholder=REF pattern='[A-Za-z0-9][A-Za-z0-9._/-]*' text='branch, tag or full commit to install' ;;
    config) placeholder=FILE pattern='[A-Za-z0-9][A-Za-z0-9._/-]*\.py' text='config file, relative to the repository' ;;
    data) placeholder=PATH pattern=$printable text='conversations: gs://BUCKET/FILE or a path on the workers' ;;
    output) placeholder=PATH pattern=$printable text='folder of the run: gs://BUCKET/FOLDER or a path on the workers' ;;
    env) placeholder=NAME=VALUE pattern="[A-Za-z_][A-Za-z0-9_]*=($printable)?" text='environment variable; repeatable' ;;
    worker) placeholder=NUMBER pattern='[0-9]+|all' text='worker to read from, or all (default 0)' ;;
    lines) placeholder=COUNT pattern='[0-9]+' text='lines to begin with (default 100)' ;;
    poll) placeholder=SECONDS pattern='[0-9]+' text='pause between looks at the state (default 60)' ;;
    cluster) placeholder=NAME pattern=$word text='GKE cluster' ;;
    workload) placeholder=NAME pattern=$word text='of the workload: a-z, 0-9, hyphens' ;;
    tpu-type) placeholder=TYPE pattern='[a-z0-9]+-[0-9]+' text='slice, such as v6e-8' ;;
    bucket) placeholder=NAME pattern='[a-z0-9][a-z0-9._-]*[a-z0-9]' text='Cloud Storage bucket, without gs://' ;;
    max-restarts) placeholder=COUNT pattern='[0-9]+' text='restarts after preemption (default 100)' ;;
    dry-run) placeholder='' text='print the commands, one a line, and run none' ;;
    help) placeholder='' text='show this help' ;;
    *) return 1 ;;
  esac
}

usage() {
  local option
  printf '%s\n\nusage: %s' "$about" "${usage_name-${0##*/}}"
  for option in "${required[@]}"; do describe "$option" && printf ' --%s %s' "$option" "$placeholder"; done
  printf ' [option ...]%s\n\n' "${rest_is:+ [-- $rest_is]}"
  for option in "${required[@]}" "${optional[@]}" dry-run help; do
    describe "$option" && printf '  %-28s %s\n' "--$option${placeholder:+ $placeholder}" "$text"
  done
}

# Reads options into `value`; both `--name value` and `--name=value` are understood.
parse() {
  local option argument known=" ${required[*]} ${optional[*]} dry-run help "
  while (($#)); do
    argument=$1
    shift
    if [[ $argument == -- ]]; then
      [[ -n $rest_is ]] || die "takes nothing after --, found: $*"
      rest=("$@")
      break
    fi
    option=${argument#--}
    option=${option%%=*}
    [[ $argument == --* && $known == *" $option "* ]] || die "unknown argument $(quote "$argument"); see --help"
    describe "$option"
    if [[ -z $placeholder ]]; then
      [[ $argument != *=* ]] || die "--$option takes no value"
      value[$option]=yes
      continue
    fi
    if [[ $argument == *=* ]]; then
      argument=${argument#*=}
    else
      (($#)) || die "--$option needs a value: --$option $placeholder"
      argument=$1
      shift
    fi
    [[ $argument =~ ^($pattern)$ ]] || die "--$option $(quote "$argument") is not a valid $placeholder ($text)"
    if [[ $option == env ]]; then environment+=("$argument"); else value[$option]=$argument; fi
  done
  if [[ -n ${value[help]-} ]]; then
    usage
    exit 0
  fi
  for option in "${required[@]}"; do
    describe "$option"
    [[ -n ${value[$option]-} ]] || die "--$option $placeholder is missing: $text"
  done
  for argument in "${rest[@]}"; do
    [[ $argument != *[[:cntrl:]]* ]] || die "$(quote "$argument") after -- holds a control character"
  done
}

# Words as a shell reads them back, quoted where needed.
quote() {
  local word separator=''
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
    printf '%s%s' "$separator" "$word"
    separator=' '
  done
}

dry_run() { [[ -n ${value[dry-run]-} ]]; }

# Runs a command, or prints it under --dry-run.
execute() {
  if dry_run; then
    printf '%s\n' "$(quote "$@")"
  else
    printf '+ %s\n' "$(quote "$@")" >&2
    "$@"
  fi
}

# One of the scripts beside this file, in the same mode.
script() {
  local name=$1
  shift
  if dry_run; then set -- "$@" --dry-run; fi
  "$(dirname "${BASH_SOURCE[0]}")/$name" "$@"
}

# --project and --zone, as every gcloud and xpk command takes them.
place() { place=("--project=${value[project]}" "--zone=${value[zone]}"); }

on_workers() {  # on_workers WORKER COMMAND
  place
  execute gcloud compute tpus tpu-vm ssh "${value[name]}" "${place[@]}" "--worker=$1" "--command=$2"
}

queued_resource() {  # queued_resource VERB ARGUMENT...
  local verb=$1
  shift
  place
  execute gcloud compute tpus queued-resources "$verb" "${value[name]}" "${place[@]}" "$@"
}

state() { queued_resource describe '--format=value(state.state)'; }
